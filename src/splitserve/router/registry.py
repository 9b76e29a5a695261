"""Registry of the workers: pools of prefill, decode and colocated workers, and the choice among them.

Life cycle of a worker:
1. It is given on the command line, or registers itself (POST /register, repeated every few seconds).
2. It can be chosen while it is healthy. A failed connection or health check excludes it at once. While its path is not
   proven (`worker.py`), workers with a proven path have priority.
3. The next successful check or registration includes it again. After a failure by its own fault it is avoided for some
   more seconds while there are others. Then it gets one request at a time until one succeeds (`worker.py`).
4. It deregisters when it drains, or an operator removes it. It stays listed until this router's requests there have
   ended, and registering again ends the drain. A registered worker that is away for `FORGET_AFTER` seconds and has no
   requests is forgotten. During a role switch by this router (`routes.py`) a worker keeps its entry until it registers
   in the new role.

This module does not know requests or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from splitserve.api.validation import DEFAULT_CONTEXT_LENGTH
from splitserve.core.clock import Clock, SystemClock
from splitserve.core.errors import NoWorkerError, UnknownWorkerError, WorkerUnavailableError
from splitserve.core.memory import MEMORY_RELEASED
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs
from splitserve.router.policies import ANY, Balance, CacheAware, RoutingQuery, create_policy
from splitserve.router.waiting import Wakeup
from splitserve.router.worker import Worker, WorkerPair, WorkerProof, side_of

logger = logging.getLogger(__name__)

# Seconds after which a registered worker that does not answer is dropped.
FORGET_AFTER = 60.0
# Seconds after which an incompatible pair gets a request again, if no probe succeeds earlier.
MISFIT_SECONDS = 60.0
# Maximum number of workers that have left with a reason. Older ones are forgotten.
MAX_LEFT = 1000
# Why a worker was removed: by a request of another process, or by its own.
_REMOVED = "it has ended, or an operator removed it: see splitserve cluster status"
_DEREGISTERED = "it deregistered, because it stops, fails or changes its role: see its log"
# Also correct while a supervisor restarts the missing worker.
_RETRY_OR_START = "retry in a moment; if none is starting, start one"
_RESUME = "retry in a moment; operators end a drain with POST /workers/resume, or splitserve cluster resume"
_RETRY_LATER = "retry when it is back; operators find its URL in GET /workers under left"
_PREFILL, _DECODE, _NULL = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL
NO_PAIR_FITS = "no prefill and decode worker that take requests fit together"


@dataclass(slots=True)
class Avoid:
    """Workers that a request avoids after a failed attempt."""

    # Excluded until they are found healthy again: clock times of their failures.
    failed: dict[Worker, float] = field(default_factory=dict)
    # Excluded while there are others: one of them is at fault, but it is unknown which.
    suspects: set[Worker] = field(default_factory=set)
    # Suspects with failures that may have passed when they are found healthy again: clock times of the failures.
    passing: dict[Worker, float] = field(default_factory=dict)

    def add_suspects(self, workers: Iterable[Worker], *, may_pass: bool) -> None:
        for worker in workers:
            if may_pass and (worker not in self.suspects or worker in self.passing):
                self.passing[worker] = worker.clock.now()
            else:
                self.passing.pop(worker, None)
            self.suspects.add(worker)

    def add_failed(self, worker: Worker, failed_at: float) -> None:
        self.failed[worker] = worker.failed_at = failed_at

    def excludes(self, worker: Worker) -> bool:
        failed_at = self.failed.get(worker)
        return failed_at is not None and worker.healthy_at <= failed_at


_NOBODY = Avoid()


class WorkerRegistry:
    def __init__(self, args: LBArgs | None = None, clock: Clock | None = None) -> None:
        args = args or LBArgs(probe=False)
        self._workers: dict[str, Worker] = {}
        balance = Balance(args.balance_abs_threshold, args.balance_rel_threshold)
        self._policies = {mode: create_policy(args.policy_of(mode), balance) for mode in DisaggregationMode}
        # Workers that deregistered with a reason: URL -> role, reason.
        self.left: dict[str, tuple[DisaggregationMode, str]] = {}
        # See LBArgs.
        self.disaggregate_above = args.disaggregate_above
        self._clock = clock or SystemClock()
        self._probe = args.probe
        # Set when a worker joins. Its waiter clears it.
        self.has_joined = asyncio.Event()
        # Sent when a worker joins or is found healthy: a choice that raised NoWorkerError may succeed then.
        self.has_takers = Wakeup()
        # Roles that had a worker.
        self._known_modes: set[DisaggregationMode] = set()
        # Whether workers of an earlier router will register here, so a role without a worker may have one again.
        self.expects_workers = False

    def add(
        self,
        url: str,
        mode: DisaggregationMode,
        bootstrap_port: int | None = None,
        *,
        is_static: bool = False,
    ) -> bool:
        """Add or refresh the worker at `url`. Return True if it is new, had left, or has another role now."""
        known = self._workers.get(url)
        if known is not None and known.mode is mode:
            known.bootstrap_port = bootstrap_port
            known.is_static = known.is_static or is_static
            if has_left := known.is_leaving:
                # It stays the same object: requests that still run there are watched and counted.
                known.rejoin()
                self.left.pop(url, None)
            # A front end also registers if its scheduler hangs. Then only a check counts. A worker that was lost may be
            # a new process, so its registration counts.
            has_failed = known.broken_off is not None or (known.healthy and known.has_failed)
            if not has_failed and not known.unready_message and known.mark_healthy():
                self.has_takers.send()
            return has_left
        worker = Worker(url, mode, bootstrap_port, is_static or (known is not None and known.is_static), self._clock)
        if self._probe:
            worker.proof = WorkerProof.wanted(is_held=any(w.unready_reason is None for w in self.pool(mode)))
        self._workers[url] = worker
        self._known_modes.add(mode)
        self.left.pop(url, None)
        self.has_joined.set()
        self.has_takers.send()
        return True

    def remove(self, url: str) -> bool:
        """Mark a worker as leaving. It is dropped when this router's requests there have ended.

        Return whether it was registered.
        """
        known = self._workers.get(url)
        if known is None:
            return False
        known.is_leaving, known.is_static, known.departure = True, False, _REMOVED
        self.forget_gone()
        return True

    def deregister(self, url: str, reason: str = "") -> bool:
        """Remove a worker at once, or when this router's requests there have ended (`forget_gone`).

        `reason`: for `unready_reason`, until it returns, or deregisters without one. Return whether it was registered.
        """
        if not reason:
            self.left.pop(url, None)
        known = self._workers.get(url)
        if known is None or known.switching_to is not None:
            return False
        known.is_leaving, known.departure = True, reason or _DEREGISTERED
        if reason:
            self.left[url] = known.mode, reason
            if len(self.left) > MAX_LEFT:
                del self.left[next(iter(self.left))]
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
            if worker.calls:
                # Health checks must still detect a hang.
                continue
            away_since = None if worker.is_static or worker.switching_to is not None else worker.unhealthy_since
            if away_since is not None and away_since <= now - FORGET_AFTER:
                logger.warning("worker forgotten url=%s mode=%s reason=unreachable", worker.url, worker.mode)
                del self._workers[worker.url]
            elif worker.is_leaving:
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
        """Return whether another worker of its mode accepts requests and fits one of the partners, if there are any."""
        partners = set(self._takers(_DECODE if worker.mode is _PREFILL else _PREFILL))
        others = (w for w in self._takers(worker.mode) if w is not worker)
        return any(not partners or not partners <= w.misfits.keys() for w in others)

    def needs(self, worker: Worker) -> bool:
        """Return whether requests can be served with this worker, but not without it."""
        takers = [w for w in self.all() if w.takes_requests]
        return _can_serve(takers) and not _can_serve([w for w in takers if w is not worker])

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
        return self.cache_aware_modes | ({_DECODE} if is_local else frozenset())

    @property
    def block_sizes(self) -> frozenset[int]:
        """Return the block sizes of all workers with known caches, tokens."""
        return frozenset(w.prefixes.block_size for w in self._workers.values() if w.prefixes is not None)

    def select(self, query: RoutingQuery = ANY, avoid: Avoid = _NOBODY) -> WorkerPair | Worker:
        """Return a pair; or one decode worker if the prompt is short; or a colocated worker if no pair is available.

        Raises NoWorkerError that names each pool without a healthy worker. WorkerUnavailableError if one of them never
        had a worker and none is expected, or if all pairs are incompatible.
        """
        prefills, decodes = self._takers(_PREFILL, avoid), self._takers(_DECODE, avoid)
        decode = None
        if query.prompts and decodes:
            decode = self._choose(decodes, query, avoid)
            limit = self.disaggregate_above
            if limit is not None and decode.num_uncached_tokens(query.prompts) + query.num_output_tokens <= limit:
                return self._placed(decode, query)
        fitting = [p for p in prefills if any(d not in p.misfits for d in decodes)]
        if not fitting:
            is_colocated = _NULL in self._known_modes and not {_PREFILL, _DECODE} <= self._known_modes
            if self.pool(_NULL) or is_colocated:
                self._check_present(avoid, _NULL)
                return self._placed(self._choose(self._takers(_NULL, avoid), query, avoid), query)
            self._check_present(avoid, _PREFILL, _DECODE)
            may_fit = _fits_any(self.pool(_PREFILL), self.pool(_DECODE))
            error = NoWorkerError if may_fit else WorkerUnavailableError
            raise error(f"{NO_PAIR_FITS}: GET /workers has the reason")
        # Keep the decode worker with the cached prompt, if some prefill worker is compatible with it.
        close = [p for p in fitting if decode is not None and decode not in p.misfits]
        prefill = self._choose(close or fitting, query, avoid)
        if decode is None or not close:
            decode = self._choose([d for d in decodes if d not in prefill.misfits], query, avoid)
        # The ranks of a decode worker distribute their requests themselves.
        self._placed(decode, query)
        return WorkerPair(prefill, decode, self._policies[_PREFILL].place(prefill, query))

    def any_healthy(self) -> Worker:
        """Return some worker, for requests that each worker answers alike. Raises as `select`."""
        for mode in (_DECODE, _NULL, _PREFILL):
            if takers := self._takers(mode):
                return self._choose(takers, ANY, _NOBODY)
        error = NoWorkerError if self._known_modes or self.expects_workers else WorkerUnavailableError
        raise error(f"no healthy worker is registered: {_RETRY_OR_START}")

    def unready_reason(self) -> str | None:
        """Return why no path through a pair or a colocated worker is proven. None: one is proven."""
        ready = {mode: [w for w in self.pool(mode) if w.unready_reason is None] for mode in DisaggregationMode}
        prefills, decodes = ready[_PREFILL], ready[_DECODE]
        if ready[_NULL] or _fits_any(prefills, decodes):
            return None
        # Omit kinds of workers that were never started.
        has_colocated = bool(self.pool(_NULL))
        modes = [_PREFILL, _DECODE] if self.pool(_PREFILL) or self.pool(_DECODE) or not has_colocated else []
        reasons = [self._describe_unready(mode) for mode in modes if not ready[mode]]
        if modes and not reasons:
            reasons = [f"{NO_PAIR_FITS} ({prefills[0].misfits[decodes[0]][0]})"]
        if has_colocated:
            reasons.append(self._describe_unready(_NULL))
        return " and ".join(reasons)

    def _describe_unready(self, mode: DisaggregationMode) -> str:
        pool = self.pool(mode)
        if not pool:
            return self._describe_missing(mode)
        counts = Counter(_why_unready(worker) for worker in pool)
        return f"no {side_of(mode)} worker is ready ({', '.join(f'{n} {why}' for why, n in counts.items())})"

    def _choose(self, takers: list[Worker], query: RoutingQuery, avoid: Avoid) -> Worker:
        """Return the worker that the policy chooses. `takers`: workers of one mode, at least one."""
        unsuspected = [w for w in takers if w not in avoid.suspects] or takers
        # If all are held back, send requests anyway: they serve as the proof, and a rejection would help no client.
        free = [w for w in unsuspected if not w.proof.is_held] or unsuspected
        trusted = [w for w in free if w.is_trusted()] or free
        return self._policies[takers[0].mode].choose(trusted, query)

    def _placed(self, worker: Worker, query: RoutingQuery) -> Worker:
        self._policies[worker.mode].place(worker, query)
        return worker

    def _takers(self, mode: DisaggregationMode, avoid: Avoid = _NOBODY) -> list[Worker]:
        return [w for w in self._workers.values() if w.mode is mode and w.takes_requests and not avoid.excludes(w)]

    def _check_present(self, avoid: Avoid, *modes: DisaggregationMode) -> None:
        """Raise WorkerUnavailableError that names the modes without a worker for requests, also in `param`."""
        missing = [mode for mode in modes if not self._takers(mode, avoid)]
        if missing:
            has_left = any(role in missing and not self.pool(role) for role, _ in self.left.values())
            drained = any(w.is_draining and w.switching_to is None for mode in missing for w in self.pool(mode))
            remedy = _RESUME if drained else _RETRY_LATER if has_left else _RETRY_OR_START
            may_return = self.expects_workers or self._known_modes.issuperset(missing)
            error = NoWorkerError if may_return else WorkerUnavailableError
            message = f"{' and '.join(map(self._describe_missing, missing))}: {remedy}"
            raise error(message, param=",".join(map(side_of, missing)))

    def _describe_missing(self, mode: DisaggregationMode) -> str:
        count = len(self.pool(mode))
        if count == 0:
            left = Counter(why for role, why in self.left.values() if role is mode)
            whys = ", ".join(f"{n} left: {why}" for why, n in left.items())
            return f"no {side_of(mode)} worker is registered{whys and f' ({whys})'}"
        draining = sum(worker.drains for worker in self.pool(mode))
        note = f" ({draining} draining)" if draining else ""
        return f"none of the {count} {side_of(mode)} worker(s) answers or takes requests{note}"


def _why_unready(worker: Worker) -> str:
    """Return a short reason without an address, because unauthenticated clients can read it."""
    if worker.has_released:
        return f"with {MEMORY_RELEASED}"
    if not worker.healthy:
        return "unhealthy"
    if worker.drains:
        return "draining"
    reasons = [reason for reason, _ in worker.misfits.values()]
    return f"incompatible: {reasons[0]}" if reasons else "not proven"


def _can_serve(workers: Sequence[Worker]) -> bool:
    prefills, decodes = ([w for w in workers if w.mode is mode] for mode in (_PREFILL, _DECODE))
    return any(w.mode is _NULL for w in workers) or _fits_any(prefills, decodes)


def _fits_any(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> bool:
    """Return whether some pair of these is not known to be incompatible."""
    return any(decode not in prefill.misfits for prefill in prefills for decode in decodes)
