"""State of one worker at the router: address, role, health, trust, and the proof of its path. Pure.

1. A worker that joins, or returns after it was lost, is in doubt.
2. It is probed (`health.py`) with growing pauses until a probe succeeds. A request that succeeds is a proof too.
3. Meanwhile it is held back: it gets no requests while there are other workers of its mode. Exception: a worker that
   joined when no worker was proven yet, until its probe fails. Without this exception, the first worker proven after a
   start of the router would get all requests.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from splitserve.core.clock import Clock, SystemClock
from splitserve.core.memory import MEMORY_RELEASED
from splitserve.core.request import DisaggregationMode
from splitserve.router.http_client import UpstreamResponse
from splitserve.router.prefixes import CachedPrefixes, PromptBlocks

# Seconds from a failed probe to the next: first pause, longest pause. Pauses double.
_PAUSES = (1.0, 30.0)

JOINED = "it has joined and is still to be probed"
LOST = "it was lost and is still to be probed again"
# Why a worker was removed, if no other reason is known.
NO_ANSWER = "it did not answer"
# Half-life of a worker's faults, seconds.
FORGIVENESS = 5.0
# Fault limits. Above the first, a worker gets no requests while there are others; above the second, one at a time.
_BROKEN, _ON_TRIAL = 1.0, 0.1


@dataclass(slots=True)
class WorkerProof:
    # Whether the worker is probed at all.
    is_wanted: bool = False
    # Why its path is not proven. None: it is proven.
    doubt: str | None = None
    # True: requests go to other workers while there are any.
    is_held: bool = False
    # Whether it has generated a token without a partner since it is in doubt.
    generates: bool = False
    # Clock time of the next probe, and number of consecutive failed probes.
    next_at: float = 0.0
    num_failures: int = 0

    @classmethod
    def wanted(cls, *, is_held: bool) -> WorkerProof:
        return cls(True, JOINED, is_held)

    def is_due(self, now: float) -> bool:
        return self.doubt is not None and now >= self.next_at

    def begin_anew(self) -> None:
        """Mark a worker that was lost as in doubt, and reset its probes."""
        if self.is_wanted:
            self.doubt, self.is_held = LOST, True
            self.generates, self.next_at, self.num_failures = False, 0.0, 0

    def fail(self, reason: str, now: float) -> None:
        first, longest = _PAUSES
        self.doubt, self.is_held = reason, True
        self.next_at = now + min(longest, first * 2**self.num_failures)
        self.num_failures += 1

    def succeed(self) -> None:
        self.doubt, self.is_held, self.generates, self.num_failures = None, False, True, 0


@dataclass(slots=True, eq=False)
class Worker:
    url: str
    mode: DisaggregationMode
    # On prefill workers: port of the bootstrap server. None: the workers' own option applies.
    bootstrap_port: int | None = None
    # Given on the command line, so never forgotten. Registered workers are forgotten if they stay away.
    is_static: bool = False
    clock: Clock = field(default_factory=SystemClock, repr=False)
    # Tokens that a request may have on this worker. None: not known yet, or not reported.
    context_length: int | None = None
    # Whether the context length was requested since the worker joined or was lost.
    is_context_current: bool = False
    # False from a failed connection or health check until the next check that succeeds.
    healthy: bool = True
    # Clock time of the first failure in a row; None while healthy.
    unhealthy_since: float | None = None
    # Clock time at which the last health check that found it healthy began.
    healthy_at: float = -math.inf
    # Clock time of the last failure after which a request avoids it until it is found healthy.
    failed_at: float = -math.inf
    # True: an operator allows no new requests there.
    is_draining: bool = False
    # Whether its last answer to a check was that its memory is released.
    has_released: bool = False
    # It has deregistered or was removed, and requests of this router still run there.
    is_leaving: bool = False
    # Why it was last removed from the registry, as far as known.
    departure: str = NO_ANSWER
    # During a role switch by this router: the new role.
    switching_to: DisaggregationMode | None = None
    # Requests of this router in flight there.
    calls: set[UpstreamResponse] = field(default_factory=set)
    # Clock time of the first unanswered check since its last heartbeat. None: no check is unanswered.
    silent_since: float | None = None
    # Its prefix caches. None: unknown, because it does not report them or no policy uses them.
    prefixes: CachedPrefixes | None = None
    # Requests in flight that were sent to a certain data parallel rank.
    num_running_of_rank: Counter[int] = field(default_factory=Counter)
    # Proof state of its path.
    proof: WorkerProof = field(default_factory=WorkerProof)
    # Incompatible partners: the difference, and the clock time until which it counts.
    misfits: dict[Worker, tuple[str, float]] = field(default_factory=dict, repr=False)
    # Message of its last answer to a check that it is not ready. Empty: it was ready, or did not answer.
    unready_message: str = ""
    # Reason why the last attempt to connect failed, as logged. Empty: it succeeded.
    connect_error: str = ""
    # Why its calls were aborted, until its next heartbeat.
    broken_off: str | None = None
    # True: its calls were aborted because it hangs. False: an operator requested it.
    is_hung: bool = False
    # Held by the one suspect request that may be at this worker, see `admission.py`.
    isolation: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    # Decaying count of requests that failed by its fault, and the clock time of its last update.
    _faults: float = 0.0
    _faults_at: float = 0.0

    @property
    def host(self) -> str:
        """Return the host name without port: the other worker of a pair connects to it for the rendezvous."""
        return _host_of(self.url)

    @property
    def side(self) -> str:
        """Return the name of its role in errors, metrics and logs."""
        return side_of(self.mode)

    @property
    def num_running(self) -> int:
        return len(self.calls)

    @property
    def has_failed(self) -> bool:
        """Return whether a request has failed there since the last check that found it healthy."""
        return self.healthy_at <= self.failed_at != -math.inf

    @property
    def takes_requests(self) -> bool:
        return self.healthy and not self.drains

    @property
    def drains(self) -> bool:
        return self.is_draining or self.is_leaving

    @property
    def unready_reason(self) -> str | None:
        """Return why it gets no requests while others of its mode are ready. None: it is ready too."""
        # A draining worker also reports that it is not ready.
        if self.is_leaving:
            return "it was removed or deregistered: it drains, or its memory or weights change (see its GET /health)"
        if self.drains:
            return "it drains"
        if self.has_released:
            return f"its {MEMORY_RELEASED}"
        if self.healthy:
            return self.proof.doubt
        return self.unready_message or self.broken_off or "it does not answer"

    def num_cached_tokens(self, hashes: Mapping[int, Sequence[int]]) -> int:
        """Return the cached tokens of a prompt with these blocks (by block size), as far as known."""
        if self.prefixes is None:
            return 0
        return self.prefixes.longest_match(hashes.get(self.prefixes.block_size, ()))

    def num_uncached_tokens(self, prompts: Sequence[PromptBlocks]) -> int:
        """Return the prompt tokens that it would compute if it served a request alone, of the longest such prompt.

        Only blocks that the worker reported in KV events count as cached; expected blocks do not. Otherwise, of several
        prompts with one prefix that arrive at once, each would count the prefix as cached. The worker would then
        compute all of them, one after the other. The last token of a prompt is always computed.
        """
        known = self.prefixes
        counts = []
        for prompt in prompts:
            cached = 0 if known is None else known.reported_match(prompt.hashes.get(known.block_size, ()))
            counts.append(max(1, prompt.num_tokens - cached))
        return max(counts, default=0)

    @contextmanager
    def serving_on(self, rank: int | None) -> Iterator[None]:
        """Count a request in flight at this data parallel rank. None: the worker chooses the rank."""
        if rank is None:
            yield
            return
        self.num_running_of_rank[rank] += 1
        try:
            yield
        finally:
            self.num_running_of_rank[rank] -= 1

    def mark_healthy(self, asked_at: float | None = None) -> bool:
        """Mark it as found healthy by a check that began at `asked_at`, now by default.

        Return whether it may get a request again that it could not get before.
        """
        returns = not self.healthy or self.has_failed
        self.healthy_at = self.clock.now() if asked_at is None else asked_at
        if not self.healthy:
            # The worker may have been restarted with other options. `cache_follower.py` follows its caches again.
            self.forget_misfits()
            self.prefixes = None
        self.healthy, self.unready_message = True, ""
        self.unhealthy_since = None
        return returns

    def mark_unhealthy(self) -> None:
        self.healthy = False
        if self.unhealthy_since is None:
            self.unhealthy_since = self.clock.now()
            self.proof.begin_anew()
            self.is_context_current, self.prefixes = False, None

    def rejoin(self) -> None:
        """Take back a worker that was leaving. It may be another process."""
        self.is_leaving = self.is_draining = False
        self.unready_message = ""
        self.mark_unhealthy()

    def add_misfit(self, partner: Worker, reason: str, until: float) -> None:
        # `reason` may be a subclass of str, which cannot be encoded.
        self.misfits[partner] = partner.misfits[self] = str(reason), until

    def forget_misfits(self, partner: Worker | None = None) -> None:
        """Forget that this worker is incompatible with `partner`. None: with any."""
        for other in list(self.misfits) if partner is None else [partner]:
            self.misfits.pop(other, None)
            other.misfits.pop(self, None)

    def heartbeat(self) -> None:
        """Record a heartbeat: a byte has arrived from the worker."""
        self.silent_since = None
        self.broken_off = None
        self.is_hung = False

    def break_off(self, reason: str, *, is_hung: bool = False) -> None:
        """Abort every call in flight there now."""
        self.broken_off = reason
        self.is_hung = is_hung
        for call in self.calls:
            call.fail(TimeoutError())

    def add_fault(self) -> None:
        """Count a request that failed by its fault."""
        self._faults, self._faults_at = self.faults() + 1.0, self.clock.now()

    def forgive(self) -> None:
        """Reset the faults, because a request succeeded."""
        self._faults = 0.0
        self.proof.succeed()

    def faults(self) -> float:
        return self._faults * math.pow(0.5, (self.clock.now() - self._faults_at) / FORGIVENESS)

    def is_trusted(self) -> bool:
        """Return whether it gets requests like any other. On trial it gets one at a time, until one succeeds."""
        if not self._faults:
            return True
        faults = self.faults()
        return faults < _ON_TRIAL or (faults < _BROKEN and not self.calls)


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """Two workers that serve one request."""

    prefill: Worker
    decode: Worker
    # Data parallel rank of the prefill worker that serves it. None: determined by its bootstrap room.
    prefill_rank: int | None = None


def side_of(mode: DisaggregationMode) -> str:
    return "colocated" if mode is DisaggregationMode.NULL else mode.value


@lru_cache(maxsize=1024)
def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""
