"""A real model behind the simulated workers: same schedulers and queues, real attention, real KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.batch import RequestStep, StepPlan, StepResult
from splitserve.core.layout import Region
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.draft import DraftingRunner
from splitserve.engine.loader import LoadedModel
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.runner import ModelRunner
from splitserve.testing.sim import EngineMaker, EngineWithMemory


class RealEngine:
    """A runner with a pool of its own over weights that others may share; with a draft model also a Proposer."""

    def __init__(
        self,
        loaded: LoadedModel,
        page_table: npt.NDArray[np.int32],
        num_pages: int,
        page_size: int,
        draft: LoadedModel | None = None,
    ) -> None:
        draft_layers = draft.layers if draft else ()
        self.layout = layout_for(
            loaded.layers, loaded.dtype_name, page_size=page_size, num_pages=num_pages, draft=draft_layers
        )
        self._pool = KVPool(self.layout, loaded.device)
        target = ModelRunner(loaded, TorchSdpaBackend(self._pool), page_size, page_table)
        self._runner: ModelRunner | DraftingRunner = target
        if draft is not None:
            attention = TorchSdpaBackend(self._pool.draft_token_to_kv_pool)
            self._runner = DraftingRunner(target, ModelRunner(draft, attention, page_size, page_table))

    def regions(self) -> tuple[Region, ...]:
        return self._pool.regions()

    @property
    def bytes_per_page(self) -> int:
        return self._pool.bytes_per_page

    def save(self, pages: Sequence[int]) -> list[torch.Tensor]:
        return self._pool.save(pages)

    def restore(self, copy: list[torch.Tensor], first: int, pages: Sequence[int]) -> None:
        self._pool.restore(copy, first, pages)

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        assert isinstance(self._runner, DraftingRunner)
        return self._runner.propose(steps, rooms)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self._runner.prepare(plan)


def real_engine(loaded: LoadedModel, draft: LoadedModel | None = None) -> EngineMaker:
    """For SimWorker's `make_engine`."""

    def make(page_table: npt.NDArray[np.int32], num_pages: int, page_size: int) -> EngineWithMemory:
        return RealEngine(loaded, page_table, num_pages, page_size, draft)

    return make
