"""Construction of the engine: load the model, allocate the pool, and create the other parts that a worker needs."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, EngineError, OptionError
from splitserve.core.layout import KVLayout, Region
from splitserve.engine.attention.base import AttentionBackend, PagedKV
from splitserve.engine.attention.flashinfer import FlashInferBackend, problem_with
from splitserve.engine.attention.kernels import KernelBackend, is_supported
from splitserve.engine.attention.latents import LatentBackend, are_latents_supported
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.draft import DraftingRunner
from splitserve.engine.graphs import CudaRecorder, DecodeGraphs, bucket_sizes
from splitserve.engine.inputs import PageTable, WindowTable
from splitserve.engine.kernels.layers import computes_all
from splitserve.engine.kernels.library import has_fast_bfloat16
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.parallel.dp_attention import SharedRunner
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.steps import FollowerRunner
from splitserve.engine.pool import KVPool, WindowDemand, layout_for, num_pages_for, pool_bytes, window_of_some
from splitserve.engine.runner import ModelRunner

logger = logging.getLogger(__name__)

_HINT = "pip install 'splitserve[cuda]'"


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model. Its KV is stored in the pages of the served model."""

    loaded: LoadedModel
    attention: AttentionBackend


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A model and its KV pool. Owned by the scheduler's process; `close` only when nothing reads the regions."""

    loaded: LoadedModel
    pool: KVPool
    attention: AttentionBackend
    # Proposer of draft tokens for `loaded`; None: no draft model. The KV of both models is in each page.
    draft: Draft | None = None
    # Maximum number of requests in a decode step that is replayed as a CUDA graph; 0: no graphs.
    max_graph_batch: int = 0
    # The pool's table of owners, if several workers compute in it.
    shared: SharedPages | None = None
    # Maximum number of tokens that a windowed layer attends to. None: no layer has window pages.
    window: int | None = None

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
    def draft_fingerprint(self) -> str:
        """Fingerprint of the draft model; empty without one."""
        return self.draft.loaded.fingerprint if self.draft else ""

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
        """Ranks that compute each step together. None: this rank computes alone, perhaps with shared experts."""
        return self.loaded.share.ranks if self.loaded.share and not self.loaded.share.meeting else None

    @property
    def batch_invariant(self) -> bool:
        """Return whether our kernels compute all matrices and attention over keys and values.

        If they do, a token's bits depend on its own sequence only.
        """
        return isinstance(self.attention, KernelBackend) and computes_all(self.loaded.model)

    def follower(self) -> FollowerRunner:
        """Return the runner of the driver's orders, for each other rank."""
        return FollowerRunner(self.loaded, self.attention, self.layout.page_size)

    def runner(
        self,
        page_table: PageTable,
        *,
        has_graphs: bool = True,
        tell: Callable[[bytes], None] | None = None,
        window_table: WindowTable | None = None,
    ) -> ModelRunner:
        """Return an engine that finds a request's pages in its row of `page_table` [rows, max pages per row].

        `window_table` has their window pages. It must be given if the layout has window pages.

        With several ranks, this is the driver's runner: `tell` sends each order to the others. These have no graphs and
        no warm-up.

        On a GPU this compiles what is compiled on first use, and records CUDA graphs unless the worker runs no decode
        steps for now (`has_graphs`): it may take a while.
        """
        if (tell is None) != (self.ranks is None):
            raise EngineError("the driver of several ranks must be able to tell them of its steps, and it alone")
        if (window_table is None) != (self.layout.num_window_pages == 0):
            raise EngineError("window pages and their table go together")
        self.pool.window_table = window_table
        share = self.loaded.share
        meets = share is not None and share.meeting is not None
        page_size = self.layout.page_size
        runner = ModelRunner(self.loaded, self.attention, page_size, page_table, tell, window_table, meets=meets)
        if tell is not None:
            return runner
        if self.pool.padding_page is not None and self.loaded.share is None:
            runner.warm_up(self.pool.padding_page, self.pool.window_padding_page)
        if has_graphs:
            self.add_graphs(runner, page_table)
        return runner

    def shared_runner(self, runner: ModelRunner) -> SharedRunner:
        """Return the runner over `runner`, which is this engine's, for ranks that compute the experts together."""
        share = self.loaded.share
        if share is None or share.meeting is None:
            raise EngineError("this rank computes its steps alone: dp_attention is not set")
        return SharedRunner(runner, self.loaded.model, share.meeting)

    def add_graphs(self, runner: ModelRunner, page_table: PageTable) -> None:
        """Record CUDA graphs of the runner's decode steps, unless it has them. Nothing may run at the same time.

        Without effect if graphs are disabled, or if the model's steps cannot be recorded.
        """
        padding_page = self.pool.padding_page
        if runner.graphs is not None or self.loaded.share is not None or not self.max_graph_batch:
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

    def drafting_runner(self, page_table: PageTable, *, has_graphs: bool = True) -> DraftingRunner:
        """Return a runner that also computes the draft model's KV, and proposes. Only with a draft model."""
        assert self.draft is not None
        draft = ModelRunner(self.draft.loaded, self.draft.attention, self.layout.page_size, page_table)
        return DraftingRunner(self.runner(page_table, has_graphs=has_graphs), draft)

    def close(self) -> None:
        self.pool.close()
        if self.shared is not None:
            self.shared.close()


def build_engine(
    model: ModelConfig,
    cache: CacheConfig,
    *,
    draft_model: str | None = None,
    shareable_pool: bool = False,
    ranks: Ranks | None = None,
    pp_layers: Sequence[int] = (),
    windows: WindowDemand | None = None,
) -> BuiltEngine:
    """Load `model` and allocate its pool as `cache` specifies. Raises ModelLoadError or ConfigError.

    `draft_model` is loaded in the same way, and shares the pool. `shareable_pool`: other processes of this host can map
    the pool. `ranks`: this rank and the others that compute the model together; each calls this, and all get the same
    number of pages. `pp_layers`: layers of each pipeline stage; empty: as even as possible. `windows`: if only some
    layers have sliding windows, these get a pool of their own; None: one pool for all layers.
    """
    if cache.page_size < 1:
        raise ConfigError(f"page_size is {cache.page_size}: it must be at least 1.")
    if ranks is not None and ranks.rank.group_size > 1:
        _refuse_on_ranks(cache, draft_model)
    loaded = load_model(model, ranks, pp_layers)
    draft = None if draft_model is None else _load_draft(draft_model, model, loaded)
    return engine_over(loaded, model, cache, draft=draft, shareable_pool=shareable_pool, windows=windows)


def _refuse_on_ranks(cache: CacheConfig, draft_model: str | None) -> None:
    if draft_model is not None:
        raise ConfigError(
            f"A draft model ({draft_model}) cannot be served beside a model that is cut over ranks: leave it out "
            "(draft tokens from the text itself, ngram, are possible), or use one rank."
        )
    if cache.shared_pool is not None:
        raise ConfigError("A shared pool is for models on one rank: leave shared_pool out, or use one rank.")


def engine_over(
    loaded: LoadedModel,
    model: ModelConfig,
    cache: CacheConfig,
    *,
    draft: LoadedModel | None = None,
    shareable_pool: bool = False,
    windows: WindowDemand | None = None,
) -> BuiltEngine:
    """Build the engine over loaded models. See `build_engine`."""
    draft_layers = draft.layers if draft else ()
    one_page = layout_for(loaded.layers, loaded.dtype_name, page_size=cache.page_size, num_pages=1, draft=draft_layers)
    window, beside = _window_pages(one_page, loaded, cache, windows)
    num_pages = num_pages_for(one_page, cache, loaded.device, beside)
    if loaded.share is not None:
        num_pages = loaded.share.ranks.least(num_pages)
    shared = None if cache.shared_pool is None else _join_pool(Path(cache.shared_pool), one_page, num_pages, cache)
    if shared is None:
        pool = KVPool(
            replace(one_page, num_pages=num_pages, num_window_pages=beside(num_pages)),
            loaded.device,
            shareable=shareable_pool,
            has_padding_page=loaded.device.type == "cuda",
            is_whole=loaded.share is None or loaded.share.meeting is not None,
        )
    else:
        pool = KVPool(replace(one_page, num_pages=shared.num_pages), loaded.device, shared=shared)
    name = model.attention_backend
    return BuiltEngine(
        loaded,
        pool,
        choose_attention(name, loaded, pool),
        None if draft is None else Draft(draft, choose_attention(name, draft, pool.draft_token_to_kv_pool)),
        # Shared pools are in memory of the CPU.
        0 if shared else model.cuda_graph_max_batch,
        shared,
        window if pool.layout.num_window_pages else None,
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


def _load_draft(name: str, model: ModelConfig, loaded: LoadedModel) -> LoadedModel:
    """Load the draft model with the device, dtype and context of `loaded`."""
    draft = load_model(msgspec.structs.replace(model, model=name, context_length=loaded.context_length))
    if draft.vocab_size != loaded.vocab_size:
        raise ConfigError(
            f"Draft model {name} has a vocabulary of {draft.vocab_size} tokens, model {loaded.name} one of "
            f"{loaded.vocab_size}: take a smaller model of the same family."
        )
    return draft


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


def choose_attention(name: str, loaded: LoadedModel, pool: PagedKV) -> AttentionBackend:
    """Return the backend. `name`: one of ATTENTION_BACKENDS. Raises ConfigError if the named one is not available."""
    if name == "flashinfer" and pool.device.type != "cuda":
        raise OptionError("--attention-backend", f"flashinfer is for GPUs, and this pool is on {pool.device}: use auto")
    if name != "torch" and pool.device.type == "cuda":
        library, problem = find_flashinfer()
        problem = problem or problem_with(pool)
        if problem is None:
            return FlashInferBackend(pool, library)
        if name == "flashinfer":
            raise OptionError("--attention-backend", f"flashinfer cannot serve {loaded.name}: {problem}. Use auto.")
        logger.warning("attention is torch's, and decode steps are not replayed as CUDA graphs: %s", problem)
    # Without instructions for bfloat16, torch converts its numbers one by one.
    widen = pool.device.type == "cpu" and loaded.dtype != torch.float32 and not has_fast_bfloat16()
    num_heads = loaded.model.config.get_text_config().num_attention_heads
    if name == "auto" and loaded.kernels is not None:
        if is_supported(pool, num_heads, loaded.kernels):
            return KernelBackend(pool, loaded.kernels)
        if are_latents_supported(pool, {shape.v_dim for shape in loaded.layers}, loaded.kernels):
            return LatentBackend(pool, loaded.kernels, widen=widen)
    return TorchSdpaBackend(pool, widen=widen)


def find_flashinfer() -> tuple[Any, str | None]:
    """Return the library, or why it is not available."""
    try:
        # Imported here, because the package is for GPUs and searches for one on import.
        import flashinfer as library
    except ModuleNotFoundError as error:
        return None, f"the Python package {error.name!r} is missing: {_HINT}"
    except Exception as error:
        # Its errors for a broken CUDA installation have no common class.
        return None, f"FlashInfer does not load ({type(error).__name__}: {error}): {_HINT}"
    return library, None
