"""Front end: the parts that every route uses. Settings, tokenizer, scheduler, request table and metrics.

Owned by the app as `app.state.front`. It builds no part itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from splitserve.api.intake import RequestMemory
from splitserve.api.json_body import DEFAULT_CONTEXT_LENGTH
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.clock import Clock, SystemClock
from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import UnknownModelError, WorkerUnavailableError
from splitserve.core.messages import SchedulerReady, SchedulerState
from splitserve.core.request import DisaggregationMode
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.server.heartbeat import Heartbeat
from splitserve.server.prompt_pool import PromptPool
from splitserve.server.requests import RequestTable
from splitserve.server.scheduler_group import SchedulerPort


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


class RoleSwitchPort(Protocol):
    """Interface of the role switch; implemented by WorkerRoleSwitch."""

    async def switch(self, order: RoleChange) -> RoleReport:
        """Switch the role. Raises SplitserveError; then the worker continues in its old role."""
        ...


@dataclass(slots=True)
class FrontEnd:
    config: WorkerConfig
    scheduler: SchedulerPort
    tokenizer: Tokenizer
    # Folder from which the model was loaded.
    model_path: str
    # Port of the bootstrap server: as configured, or as bound if that was 0.
    bootstrap_port: int
    requests: RequestTable
    metrics: WorkerMetrics
    # None: the role cannot change.
    role_switch: RoleSwitchPort | None = None
    # None: the schedulers' heartbeat is not checked.
    heartbeat: Heartbeat | None = None
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
        """Return the schedulers' info. Raises WorkerUnavailableError before they are ready, and after they are lost."""
        reason = self.unready_reason()
        if self.scheduler.info is None:
            raise WorkerUnavailableError(reason or "this worker is not ready")
        return self.scheduler.info

    def unready_reason(self) -> str | None:
        """Return why this worker accepts no requests. None: it accepts them."""
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
        """Reject new requests from now on; running ones continue."""
        self.requests.begin_drain()

    def end_drain(self) -> None:
        """Accept requests again."""
        self.requests.end_drain()

    def take_role(self, disaggregation: DisaggregationConfig, bootstrap_port: int) -> None:
        """Serve requests in the role of these settings from now on."""
        self.config = msgspec.structs.replace(self.config, disaggregation=disaggregation)
        self.bootstrap_port = bootstrap_port

    def check_role(self, mode: str | None) -> None:
        """Raise WorkerUnavailableError if a request is for a role that this worker no longer has.

        `mode`: role for which the router chose the worker. None: the request is for any role.
        """
        if mode is not None and mode != self.mode:
            raise WorkerUnavailableError(
                f"this is a {self.mode} worker now, and the request is for a {mode} worker: send it to another"
            )

    async def wait_idle(self, timeout: float) -> bool:
        """Return whether all requests ended within `timeout` seconds."""
        return await self.requests.wait_idle(timeout)

    async def states(self, timeout: float = 2.0) -> list[SchedulerState]:
        """Return a new snapshot of each scheduler, by data parallel rank, and store it for the metrics."""
        self.metrics.states = await self.scheduler.states(timeout)
        return self.metrics.states

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless `name` is absent or a name of this worker's model."""
        known = (self.served_model_name, self.model_path, self.config.model.model)
        if name is not None and name not in known:
            raise UnknownModelError(f"there is no model {name!r} here: this worker serves {known[0]!r}", param="model")
