"""One worker as the router knows it: where it is, what it does, whether it answers, and how far it is trusted."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

from splitserve.core.request import DisaggregationMode
from splitserve.router.prefixes import CachedPrefixes
from splitserve.router.proof import Proof

# Seconds after which half of what is held against a worker is forgotten.
FORGIVENESS = 5.0
# Above the first, a worker gets no requests while there are others; above the second, one at a time, as a trial.
_BROKEN, _ON_TRIAL = 1.0, 0.1


class Call(Protocol):
    def break_off(self) -> None:
        """It fails now, with the worker's `broken_off` as the reason. Does not wait."""
        ...


@dataclass(slots=True, eq=False)
class Worker:
    url: str
    mode: DisaggregationMode
    # Prefill: port of its bootstrap server; None: the workers' own option counts.
    bootstrap_port: int | None = None
    # Given on the command line: never forgotten. A registered one is, when it stays away.
    is_static: bool = False
    # Tokens that a request may have on this worker. None: not known yet, or not reported.
    context_length: int | None = None
    # False from a failed connection or health check until the next check that succeeds.
    healthy: bool = True
    # Clock time of the first failure in a row; None while healthy.
    unhealthy_since: float | None = None
    # Clock time at which it was last healthy again after a failure.
    returned_at: float = -math.inf
    # An operator wants no new requests there.
    is_draining: bool = False
    # It has deregistered, and requests of ours are still to end there.
    is_leaving: bool = False
    # While it changes its role by our order: the role it is to have.
    switching_to: DisaggregationMode | None = None
    # Requests this router has under way there.
    calls: set[Call] = field(default_factory=set)
    # Clock time at which it was asked for a sign of life and has given none since; None: it has.
    silent_since: float | None = None
    # What it has cached; None: unknown, for it does not tell, or no policy looks at it.
    prefixes: CachedPrefixes | None = None
    # Of the requests under way there, those that were sent to a certain data parallel rank.
    num_running_of_rank: Counter[int] = field(default_factory=Counter)
    # Whether a request can come through there.
    proof: Proof = field(default_factory=Proof)
    # Incompatible partners: the difference, and the clock time until which it counts.
    misfits: dict[Worker, tuple[str, float]] = field(default_factory=dict, repr=False)
    # Reason why the last attempt to connect failed, as logged. Empty: it succeeded.
    connect_error: str = ""
    # Why its calls were broken off, while that is so.
    broken_off: str | None = None
    # True: its calls were aborted because it hangs. False: an operator requested it.
    is_hung: bool = False
    # Held by the one suspect request that may be at this worker, see `isolation.py`.
    isolation: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    # Requests that failed by its fault, fewer with time, and the clock time at which that was counted.
    _faults: float = 0.0
    _faults_at: float = 0.0

    @property
    def host(self) -> str:
        """Host name alone: what the other side of a pair connects to for the rendezvous."""
        return _host_of(self.url)

    @property
    def num_running(self) -> int:
        return len(self.calls)

    @property
    def takes_requests(self) -> bool:
        return self.healthy and not self.drains

    @property
    def drains(self) -> bool:
        return self.is_draining or self.is_leaving

    @property
    def unready_reason(self) -> str | None:
        """Why it gets no requests while others of its mode are ready; None: it is, too."""
        # One that drains says that it is not ready, too.
        if self.drains:
            return "it drains"
        return self.proof.doubt if self.healthy else "it does not answer, or says that it is not ready"

    def num_cached_tokens(self, hashes: Mapping[int, Sequence[int]]) -> int:
        """Of a prompt with these blocks (by block size), as far as is known."""
        if self.prefixes is None:
            return 0
        return self.prefixes.longest_match(hashes.get(self.prefixes.block_size, ()))

    @contextmanager
    def serving_on(self, rank: int | None) -> Iterator[None]:
        """A request is under way at this data parallel rank; None: at whichever the worker likes."""
        if rank is None:
            yield
            return
        self.num_running_of_rank[rank] += 1
        try:
            yield
        finally:
            self.num_running_of_rank[rank] -= 1

    def mark_healthy(self, now: float) -> None:
        if not self.healthy:
            self.returned_at = now
            # The worker may have been restarted with other options.
            self.forget_misfits()
        self.healthy = True
        self.unhealthy_since = None

    def mark_unhealthy(self, now: float) -> None:
        self.healthy = False
        if self.unhealthy_since is None:
            self.unhealthy_since = now
            self.proof.begin_anew()

    def add_misfit(self, partner: Worker, reason: str, until: float) -> None:
        # `reason` may be a subclass of str, which cannot be encoded.
        self.misfits[partner] = partner.misfits[self] = str(reason), until

    def forget_misfits(self, partner: Worker | None = None) -> None:
        """Forget that this worker is incompatible with `partner`. None: with any."""
        for other in list(self.misfits) if partner is None else [partner]:
            self.misfits.pop(other, None)
            other.misfits.pop(self, None)

    def give_sign(self) -> None:
        """It lives: a byte of it has come."""
        self.silent_since = None
        self.broken_off = None
        self.is_hung = False

    def break_off(self, reason: str, *, is_hung: bool = False) -> None:
        """End every call under way there, now."""
        self.broken_off = reason
        self.is_hung = is_hung
        for call in self.calls:
            call.break_off()

    def add_fault(self, now: float) -> None:
        """A request failed by its fault."""
        self._faults = self.faults(now) + 1.0
        self._faults_at = now

    def forgive(self) -> None:
        """A request ended well: whatever it was, it is over."""
        self._faults = 0.0
        self.proof.succeed()

    def faults(self, now: float) -> float:
        return self._faults * math.pow(0.5, (now - self._faults_at) / FORGIVENESS)

    def is_trusted(self, now: float) -> bool:
        """Whether it gets a request like any other. Half open: one at a time, until one ends well."""
        if not self._faults:
            return True
        faults = self.faults(now)
        return faults < _ON_TRIAL or (faults < _BROKEN and not self.calls)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of one request."""

    prefill: Worker
    decode: Worker
    # Data parallel rank of the prefill worker that is to serve it; None: its bootstrap room says.
    prefill_rank: int | None = None


@lru_cache(maxsize=1024)
def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""
