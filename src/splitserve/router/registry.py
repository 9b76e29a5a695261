"""Registry of the workers: pools of prefill, decode and colocated workers, and the choice among them.

Life cycle of a worker:
1. It is given on the command line, or registers itself (POST /register, repeated every few seconds).
2. It can be chosen while it is healthy. A failed connection or health check excludes it at once. While its path is not
   proven (`worker.py`), workers with a proven path have priority.
3. The next successful check or registration includes it again. After a failure by its own fault it is avoided for some
   more seconds while there are others. Then it gets one request at a time until one succeeds (`worker.py`).
4. It deregisters when it drains, and stays listed until this router's requests there have ended. A registered worker
   that is away for `FORGET_AFTER` seconds is forgotten. During a role switch by this router (`routes.py`) a
   worker keeps its entry until it registers in the new role.

This module does not know requests or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.api.validation import DEFAULT_CONTEXT_LENGTH
from splitserve.core.clock import Clock, SystemClock
from splitserve.core.errors import UnknownWorkerError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs
from splitserve.router.policies import ANY, Balance, CacheAware, RoutingQuery, create_policy
from splitserve.router.worker import Worker, WorkerPair, WorkerProof

logger = logging.getLogger(__name__)

# Seconds after which a registered worker that does not answer is dropped.
FORGET_AFTER = 60.0
# Seconds after which an incompatible pair gets a request again, if no probe succeeds earlier.
MISFIT_SECONDS = 60.0
# Also correct while a supervisor restarts the missing worker.
_RETRY_OR_START = "retry in a moment; if none is starting, start one"
NO_PAIR_FITS = "no prefill and decode worker that take requests fit together"


@dataclass(slots=True)
class Avoid:
    """Workers that a request avoids after a failed attempt."""

    # Excluded until they were away and returned: clock times of their failures.
    failed: dict[Worker, float] = field(default_factory=dict)
    # Excluded while there are others: one of them is at fault, but it is unknown which.
    suspects: set[Worker] = field(default_factory=set)

    def excludes(self, worker: Worker) -> bool:
        failed_at = self.failed.get(worker)
        return failed_at is not None and worker.returned_at <= failed_at


_NOBODY = Avoid()


class WorkerRegistry:
    def __init__(self, args: LBArgs | None = None, clock: Clock | None = None) -> None:
        args = args or LBArgs(probe=False)
        self._workers: dict[str, Worker] = {}
        balance = Balance(args.balance_abs_threshold, args.balance_rel_threshold)
        self._policies = {mode: create_policy(args.policy_of(mode), balance) for mode in DisaggregationMode}
        # See LBArgs.
        self.disaggregate_above = args.disaggregate_above
        self._clock = clock or SystemClock()
        self._probe = args.probe
        # Set when a worker joins. Its waiter clears it.
        self.has_joined = asyncio.Event()

    def now(self) -> float:
        return self._clock.now()

    def add(
        self,
        url: str,
        mode: DisaggregationMode,
        bootstrap_port: int | None = None,
        *,
        is_static: bool = False,
    ) -> bool:
        """Add or refresh the worker at `url`. Return True if it is new, or has returned in another role."""
        known = self._workers.get(url)
        if known is not None and known.mode is mode and not known.is_leaving:
            known.bootstrap_port = bootstrap_port
            known.is_static = known.is_static or is_static
            known.mark_healthy()
            return False
        worker = Worker(url, mode, bootstrap_port, is_static or (known is not None and known.is_static), self._clock)
        if self._probe:
            worker.proof = WorkerProof.wanted(is_held=self._pool_unready_reason(mode) is None)
        self._workers[url] = worker
        self.has_joined.set()
        return True

    def remove(self, url: str) -> bool:
        """Remove a worker; its running requests continue. Return whether it was registered."""
        return self._workers.pop(url, None) is not None

    def deregister(self, url: str) -> bool:
        """Remove a worker at once, or when this router's requests there have ended (`forget_gone`).

        Return whether it was registered.
        """
        known = self._workers.get(url)
        if known is None or known.switching_to is not None:
            return False
        known.is_leaving = True
        self.forget_gone()
        return True

    def add_misfit(self, pair: WorkerPair, reason: str) -> None:
        """Store for a while that a pair cannot serve requests. No-op if either worker has been replaced since."""
        if all(self._workers.get(worker.url) is worker for worker in (pair.prefill, pair.decode)):
            pair.prefill.add_misfit(pair.decode, reason, self._clock.now() + MISFIT_SECONDS)

    def forget_gone(self) -> None:
        """Drop workers that have left or were away for too long, and misfits that expired or have no partner."""
        now = self._clock.now()
        for worker in self.all():
            away_since = None if worker.is_static or worker.switching_to is not None else worker.unhealthy_since
            if away_since is not None and away_since <= now - FORGET_AFTER:
                logger.warning("worker forgotten url=%s mode=%s reason=unreachable", worker.url, worker.mode)
                del self._workers[worker.url]
            elif worker.is_leaving and not worker.calls:
                del self._workers[worker.url]
        for worker in self._workers.values():
            for partner, (_, until) in list(worker.misfits.items()):
                if until <= now or self._workers.get(partner.url) is not partner:
                    worker.forget_misfits(partner)

    def get(self, url: str) -> Worker:
        """Return the worker at `url`. Raises UnknownWorkerError."""
        worker = self._workers.get(url.rstrip("/"))
        if worker is None:
            raise UnknownWorkerError(f"no worker is registered at {url!r}: GET /workers lists them", param="url")
        return worker

    @property
    def context_length(self) -> int:
        """Return the tokens of the longest request that some worker can serve."""
        known = [w.context_length for w in self._workers.values() if w.context_length is not None]
        return max(known, default=DEFAULT_CONTEXT_LENGTH)

    def has_stand_in(self, worker: Worker) -> bool:
        """Return whether other workers of its mode accept requests."""
        return any(w is not worker for w in self._takers(worker.mode, _NOBODY))

    def needs(self, worker: Worker) -> bool:
        """Return whether requests can be served with this worker, but not without it."""
        without = {mode: [w for w in self._takers(mode, _NOBODY) if w is not worker] for mode in DisaggregationMode}
        return worker.takes_requests and not _can_serve(without) and _can_serve({**without, worker.mode: [worker]})

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def pool(self, mode: DisaggregationMode) -> list[Worker]:
        return [w for w in self._workers.values() if w.mode is mode]

    @property
    def cache_aware_modes(self) -> frozenset[DisaggregationMode]:
        """Return the modes of workers that are chosen by their cached prefixes."""
        return frozenset(mode for mode, policy in self._policies.items() if isinstance(policy, CacheAware))

    @property
    def followed_modes(self) -> frozenset[DisaggregationMode]:
        """Return the modes of the workers for which routing uses cached prefixes."""
        is_local = self.disaggregate_above is not None
        return self.cache_aware_modes | ({DisaggregationMode.DECODE} if is_local else frozenset())

    @property
    def block_sizes(self) -> frozenset[int]:
        """Return the block sizes of all workers with known caches, tokens."""
        return frozenset(w.prefixes.block_size for w in self._workers.values() if w.prefixes is not None)

    def select(self, query: RoutingQuery = ANY, avoid: Avoid = _NOBODY) -> WorkerPair | Worker:
        """Return a pair; or one decode worker if the prompt is short; or a colocated worker if no pair is available.

        Raises WorkerUnavailableError with the reason.
        """
        decode = None
        if query.prompts and self._takers(DisaggregationMode.DECODE, avoid):
            decode = self._choose(DisaggregationMode.DECODE, query, avoid)
            if self._is_short_for(decode, query):
                self._place(decode, query)
                return decode
        if self.pool(DisaggregationMode.NULL) and not self._fitting_prefills(avoid):
            worker = self._choose(DisaggregationMode.NULL, query, avoid)
            self._place(worker, query)
            return worker
        return self.select_pair(query, avoid, decode)

    def select_pair(
        self, query: RoutingQuery = ANY, avoid: Avoid = _NOBODY, decode: Worker | None = None
    ) -> WorkerPair:
        """Return a compatible pair, with `decode` if it was chosen and is compatible with any prefill worker.

        Raises WorkerUnavailableError that names each pool without a healthy worker.
        """
        missing = [
            self._describe_missing(mode)
            for mode in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
            if not self._takers(mode, avoid)
        ]
        if missing:
            raise WorkerUnavailableError(f"{' and '.join(missing)}: {_RETRY_OR_START}")
        prefills = [] if decode is None else self._fitting_prefills(avoid, [decode])
        if not prefills:
            decode, prefills = None, self._fitting_prefills(avoid)
        if not prefills:
            raise WorkerUnavailableError(f"{NO_PAIR_FITS}: GET /workers has the reason")
        prefill = self._choose_of(DisaggregationMode.PREFILL, prefills, query, avoid)
        if decode is None:
            decodes = [w for w in self._takers(DisaggregationMode.DECODE, avoid) if w not in prefill.misfits]
            decode = self._choose_of(DisaggregationMode.DECODE, decodes, query, avoid)
        # The ranks of a decode worker distribute their requests themselves.
        self._place(decode, query)
        return WorkerPair(prefill, decode, self._place(prefill, query))

    def any_healthy(self) -> Worker:
        """Return some worker, for requests that each worker answers alike. Raises WorkerUnavailableError."""
        for mode in (DisaggregationMode.DECODE, DisaggregationMode.NULL, DisaggregationMode.PREFILL):
            if self._takers(mode, _NOBODY):
                return self._choose(mode)
        raise WorkerUnavailableError(f"no healthy worker is registered: {_RETRY_OR_START}")

    def unready_reason(self) -> str | None:
        """Return why no path through a pair or a colocated worker is proven. None: one is proven."""
        modes = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL)
        prefill, decode, null = (self._pool_unready_reason(mode) for mode in modes)
        misfit = self._misfit_of_ready()
        if null is None or prefill is decode is misfit is None:
            return None
        # Omit kinds of workers that were never started.
        has_pairs, has_colocated = (any(self.pool(mode) for mode in some) for some in (modes[:2], modes[2:]))
        reasons = [prefill, decode, misfit] if has_pairs or not has_colocated else []
        reasons += [null] if has_colocated else []
        return " and ".join(reason for reason in reasons if reason is not None)

    def _misfit_of_ready(self) -> str | None:
        """Return why no two ready workers are compatible. None: some are."""
        modes = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        prefills, decodes = ([w for w in self.pool(mode) if w.unready_reason is None] for mode in modes)
        for prefill in prefills:
            if any(decode not in prefill.misfits for decode in decodes):
                return None
        return f"{NO_PAIR_FITS} ({prefills[0].misfits[decodes[0]][0]})" if prefills and decodes else None

    def _pool_unready_reason(self, mode: DisaggregationMode) -> str | None:
        pool = self.pool(mode)
        if any(worker.unready_reason is None for worker in pool):
            return None
        name = "colocated" if mode is DisaggregationMode.NULL else mode.value
        if not pool:
            return f"no {name} worker is registered"
        counts = Counter(_why_unready(worker) for worker in pool)
        return f"no {name} worker is ready ({', '.join(f'{n} {why}' for why, n in counts.items())})"

    def _choose(self, mode: DisaggregationMode, query: RoutingQuery = ANY, avoid: Avoid = _NOBODY) -> Worker:
        takers = self._takers(mode, avoid)
        if not takers:
            raise WorkerUnavailableError(f"{self._describe_missing(mode)}: {_RETRY_OR_START}")
        return self._choose_of(mode, takers, query, avoid)

    def _choose_of(self, mode: DisaggregationMode, takers: list[Worker], query: RoutingQuery, avoid: Avoid) -> Worker:
        unsuspected = [w for w in takers if w not in avoid.suspects] or takers
        # If all are held back, send requests anyway: they serve as the proof, and a rejection would help no client.
        free = [w for w in unsuspected if not w.proof.is_held] or unsuspected
        trusted = [w for w in free if w.is_trusted()] or free
        return self._policies[mode].choose(trusted, query)

    def _fitting_prefills(self, avoid: Avoid, decodes: list[Worker] | None = None) -> list[Worker]:
        """Return the prefill workers compatible with one of `decodes`. None: with any that accepts requests."""
        decodes = self._takers(DisaggregationMode.DECODE, avoid) if decodes is None else decodes
        prefills = self._takers(DisaggregationMode.PREFILL, avoid)
        return [p for p in prefills if any(d not in p.misfits for d in decodes)]

    def _is_short_for(self, decode: Worker, query: RoutingQuery) -> bool:
        limit = self.disaggregate_above
        return limit is not None and decode.num_uncached_tokens(query.prompts) + query.num_output_tokens <= limit

    def _place(self, worker: Worker, query: RoutingQuery) -> int | None:
        policy = self._policies[worker.mode]
        return policy.place(worker, query) if isinstance(policy, CacheAware) else None

    def _takers(self, mode: DisaggregationMode, avoid: Avoid) -> list[Worker]:
        return [w for w in self.pool(mode) if w.takes_requests and not avoid.excludes(w)]

    def _describe_missing(self, mode: DisaggregationMode) -> str:
        name = "colocated" if mode is DisaggregationMode.NULL else mode.value
        count = len(self.pool(mode))
        if count == 0:
            return f"no {name} worker is registered"
        return f"none of the {count} {name} worker(s) answers or takes requests"


def _why_unready(worker: Worker) -> str:
    """Return a short reason without an address, because unauthenticated clients can read it."""
    if not worker.healthy:
        return "unhealthy"
    if worker.drains:
        return "draining"
    reasons = [reason for reason, _ in worker.misfits.values()]
    return f"incompatible: {reasons[0]}" if reasons else "not proven"


def _can_serve(takers: Mapping[DisaggregationMode, Sequence[Worker]]) -> bool:
    has_pair = takers[DisaggregationMode.PREFILL] and takers[DisaggregationMode.DECODE]
    return bool(has_pair or takers[DisaggregationMode.NULL])
