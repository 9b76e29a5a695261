"""Front end: the parts that every route uses. Settings, tokenizer, scheduler, request table, metrics, bodies.

The FrontEnd is owned by the app as `app.state.front`. It builds no part itself. Bodies are converted to the values that
a route needs off the event loop, if they are large. The RequestTable admits requests; it knows request ids and counts
only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from splitserve.api import validation
from splitserve.api.intake import RequestMemory
from splitserve.api.responses import IdWaits
from splitserve.api.schemas import RequestModel
from splitserve.api.tokenizer import Tokenizer
from splitserve.api.validation import (
    DEFAULT_CONTEXT_LENGTH,
    parse_object,
)
from splitserve.core.clock import Clock, SystemClock
from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    MemoryReleasedError,
    SplitserveError,
    UnknownModelError,
    WorkerDrainingError,
    WorkerUnavailableError,
)
from splitserve.core.messages import SchedulerReady, SchedulerState
from splitserve.core.request import DisaggregationMode
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.server.memory import MemoryControl
from splitserve.server.scheduler_group import SchedulerGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=RequestModel)
# Largest body that is processed in the event loop, bytes: some milliseconds of tokenization.
INLINE_BYTES = 8 << 10
# Largest body in the lane of medium requests, bytes.
MEDIUM_BYTES = 256 << 10
_MAX_WAITING = 256
# Seconds that a request may take in its lane, with its wait.
_LANE_SECONDS = 60.0
# Seconds between two requests for a heartbeat.
_HEARTBEAT_SECONDS = 5.0
# Age of the last heartbeat after which schedulers count as dead, seconds: several times the longest step.
MAX_HEARTBEAT_AGE = 60.0
_DRAINING = "this worker is draining and takes no new requests: send it to another"


class PromptPool:
    """Two lanes of threads. `max_waiting`: requests in each lane. `timeout`: seconds per request. `close` it."""

    def __init__(self, max_waiting: int = _MAX_WAITING, timeout: float = _LANE_SECONDS) -> None:
        self._max_waiting = max_waiting
        self._timeout = timeout
        self._lanes = {name: ThreadPoolExecutor(1, name) for name in ("medium-prompts", "large-prompts")}
        # Requests in each lane, the running one included.
        self._num_waiting = dict.fromkeys(self._lanes, 0)

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work` for a body of this size.

        Raises what `work` raises, CapacityError, DeadlineExceededError.
        """
        if num_bytes <= INLINE_BYTES:
            return work()
        lane = "medium-prompts" if num_bytes <= MEDIUM_BYTES else "large-prompts"
        if self._num_waiting[lane] >= self._max_waiting:
            raise CapacityError(f"{self._num_waiting[lane]} large requests wait for tokenization: retry later")
        self._num_waiting[lane] += 1
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], work)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the prompt was not tokenized within {self._timeout:g} s (stage: tokenization): retry later"
            ) from None
        finally:
            self._num_waiting[lane] -= 1

    def close(self) -> None:
        """Cancel work that has not begun. Idempotent."""
        for thread in self._lanes.values():
            thread.shutdown(wait=False, cancel_futures=True)


class RequestTable:
    """Open requests. `capacity`: maximum number of open samples."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Request id -> the rids of its samples.
        self._names: dict[str, tuple[str, ...]] = {}
        self._id_waits = IdWaits()
        # Rids of all open samples.
        self.rids: set[str] = set()
        # For attempts of routers: no number is used twice.
        self.attempt_numbers = count(1)
        # Those of probes, a part of `rids`. They end soon, so a change of memory waits for them.
        self.probes: set[str] = set()
        # Rids that a client or operator ordered to end: their ends do not count as failures.
        self.ordered_to_end: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # Whether new requests are rejected. Running ones continue.
        self.is_draining = False
        # Message for the clients of rejected requests.
        self.why_draining = _DRAINING
        self._rejection: type[WorkerUnavailableError] = WorkerDrainingError

    @property
    def num_open_samples(self) -> int:
        return len(self.rids)

    @contextmanager
    def admit(
        self, names: Mapping[str, tuple[str, ...]], *, is_again: bool = False, is_probe: bool = False
    ) -> Iterator[None]:
        """Hold a slot for each sample while the context is open.

        `is_again`: an earlier attempt, or request of the same id, may still run here; its samples have own rids.
        `is_probe`: the limit does not count.

        Raises WorkerDrainingError while draining, CapacityError when full, InvalidRequestError on a running id.
        """
        rids = [rid for group in names.values() for rid in group]
        self._check(names, rids, is_again, is_probe)
        for name, group in names.items():
            self._names[name] = (*self._names.get(name, ()), *group)
        self.rids.update(rids)
        self.probes.update(rids if is_probe else ())
        self._idle.clear()
        try:
            yield
        finally:
            for name, group in names.items():
                self._names[name] = tuple(rid for rid in self._names[name] if rid not in group)
                if not self._names[name]:
                    del self._names[name]
            self.rids.difference_update(rids)
            self.probes.difference_update(rids)
            self.ordered_to_end.difference_update(rids)
            if not self.rids:
                self._idle.set()

    async def wait_free(self, names: Iterable[str], timeout: float | None) -> None:
        """Wait until no request has one of these ids, as IdWaits does. `timeout`: of the new request, seconds."""
        await self._id_waits.wait(names, self.samples_of, timeout)

    def samples_of(self, name: str) -> tuple[str, ...]:
        """Return the rids to abort for this request id (or the rid of a single sample). Empty if none is open."""
        return self._names.get(name) or ((name,) if name in self.rids else ())

    def drain(self, reason: str = _DRAINING, *, has_released: bool = False) -> None:
        """Reject new requests until `is_draining` is reset. `reason`: message for their clients."""
        self.is_draining, self.why_draining = True, reason
        self._rejection = MemoryReleasedError if has_released else WorkerDrainingError

    async def wait_idle(self, timeout: float) -> bool:
        """Return whether all requests ended within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _check(self, names: Mapping[str, tuple[str, ...]], rids: list[str], is_again: bool, is_probe: bool) -> None:
        if self.is_draining:
            raise self._rejection(self.why_draining)
        if len(set(rids)) < len(rids):
            raise InvalidRequestError("two requests of the batch have the same id: give each another rid", param="rid")
        known = [] if is_again else [name for name in names if name in self._names]
        if known := known or [rid for rid in rids if rid in self.rids]:
            raise DuplicateRequestError(known[0])
        if len(self.rids) + len(rids) > self._capacity and not is_probe:
            raise CapacityError(
                f"{len(self.rids)} samples are open and {len(rids)} more would exceed this worker's {self._capacity}: "
                "retry in a second"
            )


class Heartbeat:
    """Age of the last heartbeat. Run `run` as a task."""

    def __init__(self, schedulers: SchedulerGroup, clock: Clock) -> None:
        self._schedulers = schedulers
        self._clock = clock
        self._last = clock.now()

    async def run(self, interval: float = _HEARTBEAT_SECONDS) -> None:
        """Request heartbeats until cancelled. Ended schedulers are reported elsewhere."""
        while True:
            try:
                await self._schedulers.states(timeout=interval)
                self._last = self._clock.now()
            except SplitserveError:
                # A later heartbeat may succeed. Only the age of the last one counts.
                pass
            await asyncio.sleep(interval)

    def problem(self) -> str | None:
        """Return why no request can be served. None: the last heartbeat is recent."""
        age = self._clock.now() - self._last
        if age <= MAX_HEARTBEAT_AGE:
            return None
        return f"this worker's scheduler has not answered for {age:.0f} s: restart the worker"


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Order to switch this worker's role, and how to drain its requests."""

    mode: DisaggregationMode
    # End running requests so that a router continues them elsewhere, instead of waiting for their ends.
    migrate: bool = False
    # Timeout of the whole switch, seconds.
    timeout: float = 60.0
    # On prefill workers: port of the bootstrap server. None: the one it had, or any free one.
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Result of a role switch."""

    old: DisaggregationMode
    new: DisaggregationMode
    seconds: float


@dataclass(slots=True)
class FrontEnd:
    config: WorkerConfig
    scheduler: SchedulerGroup
    tokenizer: Tokenizer
    # Folder from which the model was loaded.
    model_path: str
    # Port of the bootstrap server: as configured, or as bound if that was 0.
    bootstrap_port: int
    requests: RequestTable
    metrics: WorkerMetrics
    # Switch the role. Raises SplitserveError; then the worker continues in its old role. None: it cannot change.
    switch_role: Callable[[RoleChange], Awaitable[RoleReport]] | None = None
    # Changes of memory and weights. None: not possible.
    memory: MemoryControl | None = None
    # Model of the last update of weights from disk. None: `model_path`, from which the tokenizer is in any case.
    weights_path: str | None = None
    # None: the schedulers' heartbeat is not checked.
    heartbeat: Heartbeat | None = None
    # Returns the seconds without a heartbeat of a scheduler process. 0: none is silent.
    silence: Callable[[], float] = lambda: 0.0
    # During a role switch: the new role.
    switching_to: DisaggregationMode | None = None
    # Process ids by data parallel rank.
    scheduler_pids: tuple[int, ...] = ()
    clock: Clock = field(default_factory=SystemClock)
    # Memory of the requests in this process.
    request_memory: RequestMemory = field(default_factory=RequestMemory)
    prompt_pool: PromptPool = field(default_factory=PromptPool)

    @property
    def mode(self) -> DisaggregationMode:
        return self.config.disaggregation.mode

    @property
    def context_length(self) -> int:
        """Return the tokens that a request may have. Until the model is loaded: a default."""
        info = self.scheduler.info
        return DEFAULT_CONTEXT_LENGTH if info is None else info.max_total_tokens_per_request

    def max_body_bytes(self) -> int:
        return self.config.server.limits.request_bytes(self.context_length)

    @property
    def info(self) -> SchedulerReady:
        """Return the schedulers' info. Raises WorkerUnavailableError before they are ready, and after they are lost."""
        reason = self.unready_reason()
        if self.scheduler.info is None:
            raise WorkerUnavailableError(reason or "this worker is not ready")
        return self.scheduler.info

    def dead_reason(self) -> str | None:
        """Return why this worker must be restarted. None: its schedulers load, or have answered recently."""
        if self.scheduler.failure is not None:
            return f"this worker's scheduler is gone ({self.scheduler.failure}): restart the worker"
        return None if self.heartbeat is None else self.heartbeat.problem()

    def unready_reason(self) -> str | None:
        """Return why this worker accepts no requests. None: it accepts them."""
        if (problem := self.dead_reason()) is not None:
            return problem
        if self.scheduler.info is None:
            return "this worker is loading its model: retry when /health answers 200"
        if silence := self.silence():
            return f"a scheduler process of this worker has sent no heartbeat for {silence:.0f} s"
        if self.requests.is_draining and self.switching_to is not None:
            return "this worker is changing its role and takes no new requests: send it to another"
        if self.requests.is_draining:
            return self.requests.why_draining
        return None

    def take_role(self, disaggregation: DisaggregationConfig, bootstrap_port: int) -> None:
        """Serve requests in the role of these settings from now on."""
        self.config = msgspec.structs.replace(self.config, disaggregation=disaggregation)
        self.metrics.disaggregation = disaggregation
        self.bootstrap_port = bootstrap_port

    def check_role(self, mode: str | None) -> None:
        """Raise WorkerDrainingError if a request is for a role that this worker no longer has.

        `mode`: role for which the router chose the worker. None: the request is for any role.
        """
        if mode is not None and mode != self.mode:
            raise WorkerDrainingError(
                f"this is a {self.mode} worker now, and the request is for a {mode} worker: send it to another"
            )

    async def states(self, timeout: float = 2.0) -> list[SchedulerState]:
        """Return a new snapshot of each scheduler, by data parallel rank, and store it for the metrics."""
        self.metrics.states = await self.scheduler.states(timeout)
        return self.metrics.states

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless `name` is absent or a name of this worker's model."""
        known = (self.config.served_model_name, self.model_path, self.config.model.model)
        if name is not None and name not in known:
            raise UnknownModelError(f"there is no model {name!r} here: this worker serves {known[0]!r}", param="model")


async def read_object(
    front: FrontEnd, request: Request, prepare: Callable[[dict[str, Any]], T], empty: bytes = b""
) -> T:
    """Return the result of `prepare` for the body's JSON object. It may run in another thread.

    `empty`: what an empty body stands for.

    Raises InvalidRequestError, the errors of `prepare`, and WorkerDrainingError if the role of the worker changed.
    """
    raw = await request.body() or empty
    mode, limits = front.mode, front.config.server.limits

    def work() -> T:
        with validation.stage(request.headers.get("x-request-id"), "validation"):
            found = parse_object(raw, limits)
        return prepare(found)

    prepared = await front.prompt_pool.run(len(raw), work)
    front.check_role(mode)
    return prepared


async def read_body(front: FrontEnd, request: Request, model: type[B]) -> B:
    """Return the body as `model`, for routes that do not warn about unknown fields. Raises like `read_object`."""
    return await read_object(front, request, lambda body: validation.parse(model, body), b"{}")
