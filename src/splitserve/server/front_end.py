"""What every route works with: the worker's settings, its tokenizer, scheduler, request table and metrics.

Owned by the app as `app.state.front`. It builds nothing: the launch layer hands the parts in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from splitserve.api.limits import DEFAULT_CONTEXT_LENGTH
from splitserve.api.request_memory import RequestMemory
from splitserve.clock import Clock, SystemClock
from splitserve.config import DisaggregationConfig, WorkerConfig
from splitserve.core.request import DisaggregationMode
from splitserve.errors import UnknownModelError, WorkerUnavailableError
from splitserve.messages import SchedulerReady, SchedulerState
from splitserve.metrics.worker import WorkerMetrics
from splitserve.server.heartbeat import Heartbeat
from splitserve.server.prompt_pool import PromptPool
from splitserve.server.requests import RequestTable
from splitserve.server.scheduler_group import SchedulerPort
from splitserve.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """Another role for this worker, and how to get rid of the requests it has."""

    mode: DisaggregationMode
    # End them so that a router goes on with them elsewhere, instead of waiting for their ends.
    migrate: bool = False
    # Seconds for all of it.
    timeout: float = 60.0
    # Prefill: of its bootstrap server; None: the one it had, or any free one.
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True)
class RoleReport:
    """A switch that was made."""

    old: DisaggregationMode
    new: DisaggregationMode
    seconds: float


class RoleSwitchPort(Protocol):
    """Who changes the role: the launch layer's `RoleSwitch`."""

    async def switch(self, order: RoleOrder) -> RoleReport:
        """Raises SplitserveError; then the worker serves on in its old role."""
        ...


@dataclass(slots=True)
class FrontEnd:
    config: WorkerConfig
    scheduler: SchedulerPort
    tokenizer: Tokenizer
    # Where the model was loaded from.
    model_path: str
    # The bootstrap server's port: as configured, or as bound where that was 0.
    bootstrap_port: int
    requests: RequestTable
    metrics: WorkerMetrics
    # None where the role stays what it is.
    role_switch: RoleSwitchPort | None = None
    # None: the schedulers' heartbeat is not checked.
    heartbeat: Heartbeat | None = None
    # While it changes: the role it is to have.
    switching_to: DisaggregationMode | None = None
    # By data parallel rank.
    scheduler_pids: tuple[int, ...] = ()
    clock: Clock = field(default_factory=SystemClock)
    # Memory of the requests in this process.
    request_memory: RequestMemory = field(default_factory=RequestMemory)
    prompt_pool: PromptPool = field(default_factory=PromptPool)

    @property
    def mode(self) -> DisaggregationMode:
        return self.config.disaggregation.mode

    @property
    def served_model_name(self) -> str:
        return self.config.server.served_model_name or self.config.model.model

    @property
    def context_length(self) -> int:
        """Return the tokens that a request may have. Until the model is loaded: a default."""
        info = self.scheduler.info
        return DEFAULT_CONTEXT_LENGTH if info is None else info.max_total_tokens_per_request

    @property
    def max_body_bytes(self) -> int:
        return self.config.server.limits.request_bytes(self.context_length)

    @property
    def info(self) -> SchedulerReady:
        """Raises WorkerUnavailableError until the scheduler is ready, and after it is gone."""
        reason = self.unready_reason()
        if self.scheduler.info is None:
            raise WorkerUnavailableError(reason or "this worker is not ready")
        return self.scheduler.info

    def unready_reason(self) -> str | None:
        """Why this worker takes no requests; None if it does."""
        if self.scheduler.failure is not None:
            return f"this worker's scheduler is gone ({self.scheduler.failure}): restart the worker"
        if self.scheduler.info is None:
            return "this worker is loading its model: retry when /health answers 200"
        if self.heartbeat is not None and (problem := self.heartbeat.problem()) is not None:
            return problem
        if self.requests.is_draining and self.switching_to is not None:
            return "this worker is changing its role and takes no new requests: send it to another"
        if self.requests.is_draining:
            return "this worker is draining and takes no new requests: send it to another"
        return None

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those running go on."""
        self.requests.begin_drain()

    def end_drain(self) -> None:
        """Take requests again."""
        self.requests.end_drain()

    def take_role(self, disaggregation: DisaggregationConfig, bootstrap_port: int) -> None:
        """From now on requests are served in the role of these settings."""
        self.config = msgspec.structs.replace(self.config, disaggregation=disaggregation)
        self.bootstrap_port = bootstrap_port

    def check_role(self, mode: str | None) -> None:
        """Raises WorkerUnavailableError where a request is meant for another role, which this worker had a moment ago.

        None: the request does not say.
        """
        if mode is not None and mode != self.mode:
            raise WorkerUnavailableError(
                f"this is a {self.mode} worker now, and the request is for a {mode} worker: send it to another"
            )

    async def wait_idle(self, timeout: float) -> bool:
        """Whether all requests ended within `timeout` seconds."""
        return await self.requests.wait_idle(timeout)

    async def states(self, timeout: float = 2.0) -> list[SchedulerState]:
        """A fresh snapshot of each scheduler, by data parallel rank; also kept for the metrics."""
        self.metrics.states = await self.scheduler.states(timeout)
        return self.metrics.states

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is absent or one this worker answers to."""
        known = (self.served_model_name, self.model_path, self.config.model.model)
        if name is not None and name not in known:
            raise UnknownModelError(f"there is no model {name!r} here: this worker serves {known[0]!r}", param="model")
