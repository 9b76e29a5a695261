"""Stand-in for what surrounds a worker's front end when its role or memory changes, and the record of its steps."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import SplitserveError
from splitserve.core.request import DisaggregationMode
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.server.front_end import FrontEnd, RequestTable
from splitserve.worker.role_switch import WorkerRoleSwitch


class WorkerSurroundings:
    """Schedulers, bootstrap server and router of one worker, in one.

    Subclasses add the orders. `fails`: the error of a step. `held`: event that a step waits for.
    """

    info: Any = object()
    failure = None

    def __init__(self, mode: DisaggregationMode, **disaggregation: Any) -> None:
        self.steps: list[str] = []
        self.fails: dict[str, SplitserveError] = {}
        self.held: dict[str, asyncio.Event] = {}
        # Set when a held step has begun.
        self.reached = asyncio.Event()
        self.port: int | None = 7000 if mode is DisaggregationMode.PREFILL else None
        config = WorkerConfig(disaggregation=DisaggregationConfig(mode=mode, **disaggregation))
        self.front = FrontEnd(
            config=config,
            scheduler=cast("Any", self),
            tokenizer=cast("Any", None),
            model_path="/m",
            bootstrap_port=self.port or 8998,
            requests=RequestTable(8),
            metrics=WorkerMetrics("m"),
        )
        self.switch = WorkerRoleSwitch(self.front, *cast("Any", (self, self, self)))

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.held:
            self.reached.set()
            await self.held[name].wait()
        if name in self.fails:
            raise self.fails[name]

    async def cancel_role(self) -> None:
        await self._step("cancel")

    def retire(self) -> None:
        self.port = None
