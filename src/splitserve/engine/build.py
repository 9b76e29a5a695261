"""Construction of the engine: load the model, allocate the pool, and create the other parts that a worker needs."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from splitserve.cache.host_memory import HostCopies
from splitserve.cache.shared_pages import SharedPages
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, EngineError
from splitserve.core.layout import KVLayout, Region
from splitserve.core.machine import Sharing
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine.attention.base import AttentionBackend
from splitserve.engine.attention.choice import choose_attention
from splitserve.engine.attention.flashinfer import FlashInferBackend
from splitserve.engine.attention.kernels import KernelBackend
from splitserve.engine.attention.latents import LatentBackend
from splitserve.engine.draft import DraftingRunner, PipelinedDraftingRunner, ProposingRunner
from splitserve.engine.draft_model import LoadedDraft
from splitserve.engine.graphs import CudaRecorder, DecodeGraphs, bucket_sizes
from splitserve.engine.heads.drafting import HeadDraftingRunner
from splitserve.engine.heads.head import DraftHead
from splitserve.engine.inputs import PageTable, WindowTable
from splitserve.engine.kernels.layers import computes_all
from splitserve.engine.loader import LoadedModel
from splitserve.engine.model_source import ModelSource
from splitserve.engine.parallel.copies import FollowerCopies, GroupCopies, RankCopies, page_bytes_of_ranks
from splitserve.engine.parallel.dp_attention import SharedRunner
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.steps import DraftingFollower, FollowerRunner, JointOrders, marked_as_draft
from splitserve.engine.pool import (
    KVPool,
    PageBytes,
    WindowDemand,
    layout_for,
    num_pages_for,
    pool_bytes,
    window_of_some,
)
from splitserve.engine.runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """This rank's part of a draft model, or a draft head. Its KV is stored in the pages of the served model."""

    loaded: LoadedModel
    attention: AttentionBackend

    @property
    def is_head(self) -> bool:
        return isinstance(self.loaded.model, DraftHead)


@dataclass(slots=True, eq=False)
class BuiltEngine:
    """A model and its KV pool. Owned by the scheduler's process; `close` only when nothing reads the regions."""

    # The models change when `engine/memory.py` replaces the weights (`use`), the other fields never.
    loaded: LoadedModel
    # Config with which `loaded` was loaded on this rank.
    config: ModelConfig
    pool: KVPool
    attention: AttentionBackend
    # Proposer of draft tokens for `loaded`; None: not on this rank. The KV of both models is in each page.
    draft: Draft | None = None
    # Fingerprint of the draft model, whichever rank has it; empty: there is none.
    draft_fingerprint: str = ""
    # Width of the state that a draft head passes on with each request, on all ranks; 0: there is no head.
    draft_state_size: int = 0
    # Maximum number of requests in a decode step that is replayed as a CUDA graph; 0: no graphs.
    max_graph_batch: int = 0
    # The pool's table of owners, if several workers compute in it.
    shared: SharedPages | None = None
    # Maximum number of tokens that a windowed layer attends to. None: no layer has window pages.
    window: int | None = None
    # Bytes of the copy of a page, on all ranks of the scheduler. None: this rank has whole pages.
    page_bytes_of_ranks: PageBytes | None = None
    # Loads the models again.
    source: ModelSource = field(default_factory=ModelSource)
    # Called after the models have changed: the runners of this engine take them.
    _runners: list[Callable[[], None]] = field(default_factory=list)

    def use(self, loaded: LoadedModel, draft: LoadedDraft | None) -> None:
        """Compute later steps with other models of the same shape. Without a model in them, no step may run."""
        self.loaded = loaded
        if draft is not None:
            self.draft_fingerprint = draft.fingerprint
            if self.draft is not None and draft.loaded is not None:
                self.draft = replace(self.draft, loaded=draft.loaded)
        for take_models in self._runners:
            take_models()

    @property
    def layout(self) -> KVLayout:
        return self.pool.layout

    @property
    def regions(self) -> tuple[Region, ...]:
        """Memory for the transport: region i is component i of the layout."""
        return self.pool.regions()

    @property
    def fingerprint(self) -> str:
        """Peers may exchange KV only if their fingerprints are equal."""
        return self.loaded.fingerprint

    @property
    def num_pages(self) -> int:
        """Pages of this worker."""
        return self.shared.pages_per_worker if self.shared else self.layout.num_pages

    @property
    def max_total_tokens_per_request(self) -> int:
        """Maximum prompt and output tokens of a request: the context, or all pages of this worker if that is less."""
        return min(self.loaded.context_length, self.num_pages * self.layout.page_size)

    @property
    def ranks(self) -> Ranks | None:
        """Ranks that share the steps of one scheduler. None: this rank computes them alone, or shares only experts."""
        ranks = self.loaded.share.step_ranks if self.loaded.share else None
        return ranks if ranks is not None and ranks.rank.group_size > 1 else None

    @property
    def batch_invariant(self) -> bool:
        """Return whether our kernels compute all matrices and attention.

        If they do, a token's bits depend on its own sequence only.
        """
        return isinstance(self.attention, (KernelBackend, LatentBackend)) and computes_all(self.loaded.model)

    def follower(self) -> FollowerRunner | DraftingFollower:
        """Return the runner of the driver's orders, for each other rank."""
        assert self.ranks is not None
        copies = FollowerCopies(RankCopies(self.pool), self.ranks.all_agree)
        page_size = self.layout.page_size
        target = FollowerRunner(self.loaded, self.attention, page_size, copies)
        self._runners.append(lambda: target.use(self.loaded))
        if self.draft is None:
            return target
        draft = FollowerRunner(self.draft.loaded, self.draft.attention, page_size, copies)
        self._runners.append(lambda: draft.use(self._loaded_draft()))
        return DraftingFollower(target, draft)

    def _loaded_draft(self) -> LoadedModel:
        assert self.draft is not None
        return self.draft.loaded

    def copies(self, send_order: Callable[[bytes], None] | None) -> HostCopies:
        """Return the owner of copies in host memory: this pool, or those of all ranks. `send_order`: as in `runner`."""
        if send_order is None:
            return self.pool
        assert self.ranks is not None
        assert self.page_bytes_of_ranks is not None
        return GroupCopies(self.pool, send_order, self.ranks.all_agree, self.page_bytes_of_ranks)

    def runner(
        self,
        page_table: PageTable,
        *,
        has_graphs: bool = True,
        send_order: Callable[[bytes], None] | None = None,
        window_table: WindowTable | None = None,
    ) -> ModelRunner:
        """Return an engine that finds a request's pages in its row of `page_table` [rows, max pages per row].

        `window_table` has their window pages. It must be given if the layout has window pages.

        With several ranks, this is the driver's runner: `send_order` sends each order to the others. These have no
        graphs and no warm-up.

        On a GPU this compiles what is compiled on first use, and records CUDA graphs unless the worker runs no decode
        steps for now (`has_graphs`): it may take a while.
        """
        if (send_order is None) != (self.ranks is None):
            raise EngineError("send_order is needed on the driver of several ranks, and only there")
        if (window_table is None) != (self.layout.num_window_pages == 0):
            raise EngineError("window pages and their table go together")
        self.pool.window_table = window_table
        share = self.loaded.share
        meets = share is not None and share.meeting is not None
        page_size = self.layout.page_size
        runner = ModelRunner(self.loaded, self.attention, page_size, page_table, send_order, window_table, meets=meets)
        self._runners.append(lambda: runner.use(self.loaded))
        if send_order is not None:
            return runner
        if self.pool.padding_page is not None and self.loaded.share is None:
            runner.warm_up(self.pool.padding_page, self.pool.window_padding_page)
        if has_graphs:
            self.add_graphs(runner, page_table)
        return runner

    def shared_runner(self, runner: ModelRunner, orders: JointOrders | None = None) -> SharedRunner:
        """Wrap `runner`, a runner of this engine, for ranks that compute the experts together.

        `orders`: the orders of `runner` to the other ranks of its scheduler. None: it has no other ranks.
        """
        share = self.loaded.share
        if share is None or share.meeting is None:
            raise EngineError("this rank computes its steps alone: dp_attention is not set")
        shared = SharedRunner(runner, self.loaded.model, share.meeting, orders)
        self._runners.append(lambda: shared.use(self.loaded))
        return shared

    def add_graphs(self, runner: ModelRunner, page_table: PageTable) -> None:
        """Record CUDA graphs of the runner's decode steps, unless it has them. Nothing may run at the same time.

        Without effect if graphs are disabled, or if the model's steps cannot be recorded.
        """
        padding_page = self.pool.padding_page
        if runner.graphs is not None or self.loaded.share is not None or not self.max_graph_batch:
            return
        if self.draft is not None and self.draft.is_head:
            # A replayed step returns the hidden states of its last layer only.
            return
        if padding_page is None or not isinstance(self.attention, FlashInferBackend):
            return
        try:
            with torch.inference_mode():
                runner.graphs = DecodeGraphs(
                    self.loaded.model,
                    self.attention,
                    CudaRecorder(self.pool.device),
                    sizes=bucket_sizes(self.max_graph_batch),
                    max_pages=page_table.shape[1],
                    page_size=self.layout.page_size,
                    padding_page=padding_page,
                    window_padding_page=self.pool.window_padding_page,
                    device=self.pool.device,
                )
        except Exception as error:
            # For example a model that reads a number from the device in its forward (experts chosen on the host).
            logger.warning("decode runs without CUDA graphs: recording failed: %s: %s", type(error).__name__, error)

    def drafting_runner(
        self, page_table: PageTable, *, has_graphs: bool = True, send_order: Callable[[bytes], None] | None = None
    ) -> ProposingRunner:
        """Return a runner that also computes the KV of the draft model or head, and proposes. Only with one of them.

        `send_order`: as in `runner`.
        """
        assert self.draft is not None
        model, attention, page_size = self.draft.loaded, self.draft.attention, self.layout.page_size
        target = self.runner(page_table, has_graphs=has_graphs, send_order=send_order)
        if self.draft.is_head:
            heads = HeadDraftingRunner(target, self.loaded, model, attention, page_size, page_table)
            self._runners.append(lambda: heads.use(self.loaded, self._loaded_draft()))
            return heads
        send_draft = None if send_order is None or model.share is None else marked_as_draft(send_order)
        draft = ModelRunner(model, attention, page_size, page_table, send_draft)
        self._runners.append(lambda: draft.use(self._loaded_draft()))
        has_stages = self.ranks is not None and self.ranks.rank.pp_size > 1
        return (PipelinedDraftingRunner if has_stages else DraftingRunner)(target, draft)

    def close(self) -> None:
        self.pool.close()
        if self.shared is not None:
            self.shared.close()


def build_engine(
    model: ModelConfig,
    cache: CacheConfig,
    *,
    draft_model: str | None = None,
    draft_head: SpeculativeAlgorithm | None = None,
    pool_sharing: Sharing = Sharing.NONE,
    ranks: Ranks | None = None,
    pp_layers: Sequence[int] = (),
    windows: WindowDemand | None = None,
) -> BuiltEngine:
    """Load `model` and allocate its pool as `cache` specifies. Raises ModelLoadError or ConfigError.

    `draft_model` shares the pool. `draft_head`: its kind, if it is a head instead of a model; without a name it is in
    the checkpoint. `pool_sharing`: whether other processes of this host can map a pool on the CPU. `ranks`: this
    rank and the others that compute the model together; each calls this, and all get the same number of pages.
    `pp_layers`: layers of each pipeline stage; empty: as even as possible. `windows`: if only some layers have sliding
    windows, these get a pool of their own; None: one pool for all layers.
    """
    if cache.page_size < 1:
        raise ConfigError(f"page_size is {cache.page_size}: it must be at least 1.")
    if ranks is not None and ranks.rank.group_size > 1 and cache.shared_pool is not None:
        raise ConfigError("A shared pool is for models on one rank: leave shared_pool out, or use one rank.")
    source = ModelSource(ranks, pp_layers, draft_model, draft_head)
    loaded = source.load(model)
    draft = source.load_draft(model, loaded)
    engine = engine_over(loaded, model, cache, draft=draft, pool_sharing=pool_sharing, windows=windows)
    engine.source = source
    return engine


def _is_shareable(sharing: Sharing, device: torch.device, *, has_windows: bool) -> bool:
    """Return whether other processes can map a pool. `has_windows`: window pages.

    These are not provided ahead of use, so they would have no huge pages in shareable memory.
    """
    if device.type != "cpu" or sharing is Sharing.NONE:
        return False
    return sharing is Sharing.ALWAYS or not has_windows


def engine_over(
    loaded: LoadedModel,
    model: ModelConfig,
    cache: CacheConfig,
    *,
    draft: LoadedDraft | None = None,
    pool_sharing: Sharing = Sharing.NONE,
    windows: WindowDemand | None = None,
) -> BuiltEngine:
    """Build the engine over loaded models. See `build_engine`."""
    draft_model = draft.loaded if draft else None
    draft_layers = draft_model.layers if draft_model else ()
    one_page = layout_for(loaded.layers, loaded.dtype_name, page_size=cache.page_size, num_pages=1, draft=draft_layers)
    window, beside = _window_pages(one_page, loaded, cache, windows)
    num_pages = num_pages_for(one_page, cache, loaded.device, beside)
    if loaded.share is not None:
        num_pages = loaded.share.ranks.least(num_pages)
    shared = None if cache.shared_pool is None else _join_pool(Path(cache.shared_pool), one_page, num_pages, cache)
    if shared is None:
        layout = replace(one_page, num_pages=num_pages, num_window_pages=beside(num_pages))
        pool = KVPool(
            layout,
            loaded.device,
            shareable=_is_shareable(pool_sharing, loaded.device, has_windows=layout.num_window_pages > 0),
            has_padding_page=loaded.device.type == "cuda",
            is_releasable=cache.enable_memory_saver and loaded.device.type == "cuda",
        )
    else:
        pool = KVPool(replace(one_page, num_pages=shared.num_pages), loaded.device, shared=shared)
    step_ranks = loaded.share.step_ranks if loaded.share else None
    attention = functools.partial(choose_attention, model.attention_backend, in_fixed_order=model.deterministic)
    return BuiltEngine(
        loaded,
        model,
        pool,
        attention(loaded, pool),
        Draft(draft_model, attention(draft_model, pool.draft_token_to_kv_pool)) if draft_model else None,
        draft.fingerprint if draft else "",
        draft.state_size if draft else 0,
        # No CUDA graphs: a shared pool is in CPU memory, and attention in fixed order cannot be recorded.
        0 if shared or model.deterministic else model.cuda_graph_max_batch,
        shared,
        window if pool.layout.num_window_pages else None,
        None if step_ranks is None or step_ranks.rank.group_size == 1 else page_bytes_of_ranks(pool, step_ranks),
    )


def _window_pages(
    one_page: KVLayout, loaded: LoadedModel, cache: CacheConfig, windows: WindowDemand | None
) -> tuple[int | None, Callable[[int], int]]:
    """Return (largest window if only some layers have one, function from pages to window pages beside them)."""
    window = window_of_some(one_page, loaded.share.ranks if loaded.share else None) if windows else None
    if windows is None or window is None:
        return None, lambda num_pages: 0
    if windows.obstacle is not None:
        logger.warning(
            "layers of %s with sliding windows keep all tokens: their own pool cannot be had with %s",
            loaded.name,
            windows.obstacle,
        )
        return None, lambda num_pages: 0
    return window, functools.partial(windows.num_window_pages, page_size=cache.page_size, window=window)


def _join_pool(file: Path, one_page: KVLayout, num_pages: int, cache: CacheConfig) -> SharedPages:
    shape = hashlib.blake2b(msgspec.json.encode(one_page), digest_size=16).digest()
    shared = SharedPages(
        file,
        pages_per_worker=num_pages,
        shape=shape,
        arena_bytes=lambda n: pool_bytes(replace(one_page, num_pages=n)),
    )
    if cache.max_total_tokens is not None and shared.pages_per_worker != num_pages:
        raise ConfigError(
            f"max_total_tokens is {cache.max_total_tokens}, and the shared pool has "
            f"{shared.pages_per_worker * cache.page_size} for each worker: give all its workers the same."
        )
    return shared
