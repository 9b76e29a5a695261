"""Real model behind the simulated workers: same schedulers and queues, real attention, real KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from splitserve.core.batch import RequestStep, StepPlan, StepResult
from splitserve.core.layout import Region
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.draft import DraftingRunner
from splitserve.engine.loader import LoadedModel
from splitserve.engine.pool import KVPool, PagesCopy, layout_for
from splitserve.engine.runner import ModelRunner
from support.sim import EngineMaker, EngineWithMemory


class RealEngine:
    """Runner with its own pool over weights that may be shared. With a draft model it is a Proposer, too."""

    def __init__(
        self,
        loaded: LoadedModel,
        page_table: npt.NDArray[np.int32],
        num_pages: int,
        page_size: int,
        draft: LoadedModel | None = None,
        num_window_pages: int = 0,
    ) -> None:
        draft_layers = draft.layers if draft else ()
        self.layout = layout_for(
            loaded.layers, loaded.dtype_name, page_size=page_size, num_pages=num_pages, draft=draft_layers
        )
        self.layout = replace(self.layout, num_window_pages=num_window_pages)
        self._pool = KVPool(self.layout, loaded.device)
        self._page_table = page_table
        self._loaded = loaded
        target = ModelRunner(loaded, TorchSdpaBackend(self._pool), page_size, page_table)
        self._runner: ModelRunner | DraftingRunner = target
        if draft is not None:
            attention = TorchSdpaBackend(self._pool.draft_token_to_kv_pool)
            self._runner = DraftingRunner(target, ModelRunner(draft, attention, page_size, page_table))

    @property
    def window_table(self) -> npt.NDArray[np.int32] | None:
        return self._pool.window_table

    @window_table.setter
    def window_table(self, table: npt.NDArray[np.int32] | None) -> None:
        """Set the window table, before the first step."""
        self._pool.window_table = table
        attention, page_size = TorchSdpaBackend(self._pool), self.layout.page_size
        self._runner = ModelRunner(self._loaded, attention, page_size, self._page_table, window_table=table)

    def regions(self) -> tuple[Region, ...]:
        return self._pool.regions()

    @property
    def bytes_per_page(self) -> int:
        return self._pool.bytes_per_page

    def bytes_of(self, pages: Sequence[int]) -> int:
        return self._pool.bytes_of(pages)

    def save(self, pages: Sequence[int]) -> PagesCopy:
        return self._pool.save(pages)

    def restore(self, copy: PagesCopy, first: int, pages: Sequence[int]) -> None:
        self._pool.restore(copy, first, pages)

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        assert isinstance(self._runner, DraftingRunner)
        return self._runner.propose(steps, rooms)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self._runner.prepare(plan)


def real_engine(loaded: LoadedModel, draft: LoadedModel | None = None, num_window_pages: int = 0) -> EngineMaker:
    """Return an engine maker for SimWorker's `make_engine`."""

    def make(page_table: npt.NDArray[np.int32], num_pages: int, page_size: int) -> EngineWithMemory:
        return RealEngine(loaded, page_table, num_pages, page_size, draft, num_window_pages)

    return make
