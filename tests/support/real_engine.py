"""Real model behind the simulated workers: same schedulers and queues, real attention, real KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.layout import Region
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.attention.choice import choose_attention
from splitserve.engine.draft import DraftingRunner
from splitserve.engine.heads.drafting import HeadDraftingRunner
from splitserve.engine.heads.head import DraftHead
from splitserve.engine.loader import LoadedModel
from splitserve.engine.pool import KVPool, PagesCopy, layout_for
from splitserve.engine.runner import ModelRunner
from splitserve.scheduler.speculation import Proposer
from support.sim import EngineMaker, EngineWithMemory


class RealEngine:
    """Runner with its own pool over weights that may be shared. With a draft model or head it has a proposer."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_pages: int,
        page_size: int,
        draft: LoadedModel | None = None,
        num_window_pages: int = 0,
    ) -> None:
        self._loaded, self._draft = loaded, draft
        layout = layout_for(
            loaded.layers,
            loaded.dtype_name,
            page_size=page_size,
            num_pages=num_pages,
            draft=draft.layers if draft else (),
        )
        self.layout = replace(layout, num_window_pages=num_window_pages)
        self._pool = KVPool(self.layout, loaded.device)
        self._runner: ModelRunner | DraftingRunner | HeadDraftingRunner | None = None

    def start(self, page_table: npt.NDArray[np.int32], window_table: npt.NDArray[np.int32] | None) -> Proposer | None:
        """Use these tables from here on. Return the proposer of draft tokens, if there is a draft model."""
        page_size = self.layout.page_size
        self._pool.window_table = window_table
        attention = choose_attention("auto", self._loaded, self._pool)
        target = ModelRunner(self._loaded, attention, page_size, page_table, window_table=window_table)
        self._runner = target
        if self._draft is None:
            return None
        attention = choose_attention("auto", self._draft, self._pool.draft_token_to_kv_pool)
        drafting: DraftingRunner | HeadDraftingRunner
        if isinstance(self._draft.model, DraftHead):
            drafting = HeadDraftingRunner(target, self._loaded, self._draft, attention, page_size, page_table)
        else:
            drafting = DraftingRunner(target, ModelRunner(self._draft, attention, page_size, page_table))
        self._runner = drafting
        return drafting

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

    def drop(self, copy: PagesCopy) -> None:
        self._pool.drop(copy)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self.runner.prepare(plan)

    @property
    def runner(self) -> ModelRunner | DraftingRunner | HeadDraftingRunner:
        assert self._runner is not None
        return self._runner


def real_engine(loaded: LoadedModel, draft: LoadedModel | None = None, num_window_pages: int = 0) -> EngineMaker:
    """Return an engine maker for SimWorker's `make_engine`."""

    def make(num_pages: int, page_size: int) -> EngineWithMemory:
        return RealEngine(loaded, num_pages, page_size, draft, num_window_pages)

    return make


def varied_sampling(number: int, num_output_tokens: int, **more: Any) -> ResolvedSampling:
    """Return how request `number` of a test samples: greedy and seeded in turns, with penalties and filters."""
    return ResolvedSampling(
        max_new_tokens=num_output_tokens,
        min_new_tokens=20,
        temperature=0.6 * (number % 2),
        seed=number,
        top_p=0.9 if number % 4 == 3 else 1.0,
        frequency_penalty=0.5 * (number % 3),
        **more,
    )
