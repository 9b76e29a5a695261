"""A real model behind the simulated workers: same schedulers and queues, real attention, real KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.layout import Region
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.loader import LoadedModel
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.runner import ModelRunner
from splitserve.testing.sim import EngineMaker, EngineWithMemory


class RealEngine:
    """A runner with a pool of its own over weights that others may share."""

    def __init__(self, loaded: LoadedModel, page_table: npt.NDArray[np.int32], num_pages: int, page_size: int) -> None:
        self.layout = layout_for(loaded.layers, loaded.dtype_name, page_size=page_size, num_pages=num_pages)
        self._pool = KVPool(self.layout, loaded.device)
        self._runner = ModelRunner(loaded, TorchSdpaBackend(self._pool), page_size, page_table)

    def regions(self) -> tuple[Region, ...]:
        return self._pool.regions()

    @property
    def bytes_per_page(self) -> int:
        return self._pool.bytes_per_page

    def save(self, pages: Sequence[int]) -> list[torch.Tensor]:
        return self._pool.save(pages)

    def restore(self, copy: list[torch.Tensor], first: int, pages: Sequence[int]) -> None:
        self._pool.restore(copy, first, pages)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self._runner.prepare(plan)


def real_engine(loaded: LoadedModel) -> EngineMaker:
    """For SimWorker's `make_engine`."""

    def make(page_table: npt.NDArray[np.int32], num_pages: int, page_size: int) -> EngineWithMemory:
        return RealEngine(loaded, page_table, num_pages, page_size)

    return make
