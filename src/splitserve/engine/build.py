"""The engine in one call: load the model, take the memory, hand out what the other parts of a worker need."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import CacheConfig, ModelConfig
from splitserve.core.layout import KVLayout, Region
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.inputs import PageTable
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.pool import KVPool, layout_for, num_pages_for
from splitserve.engine.runner import ModelRunner
from splitserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A model and its KV pool. Owned by the scheduler's process; `close` when nothing reads the regions any more."""

    loaded: LoadedModel
    pool: KVPool

    @property
    def layout(self) -> KVLayout:
        return self.pool.layout

    @property
    def regions(self) -> tuple[Region, ...]:
        """Memory for the transport: region i is component i of the layout."""
        return self.pool.regions()

    @property
    def fingerprint(self) -> str:
        """Peers may exchange KV only if theirs is equal."""
        return self.loaded.fingerprint

    @property
    def max_total_tokens_per_request(self) -> int:
        """Longest prompt + output: the context, or the whole pool where that is smaller."""
        return min(self.loaded.context_length, self.layout.num_pages * self.layout.page_size)

    def runner(self, page_table: PageTable) -> ModelRunner:
        """An engine that finds a request's pages in its row of `page_table` [rows, max pages a row]."""
        return ModelRunner(self.loaded, TorchSdpaBackend(self.pool), self.layout.page_size, page_table)

    def close(self) -> None:
        self.pool.close()


def build_engine(model: ModelConfig, cache: CacheConfig, *, shareable_pool: bool = False) -> BuiltEngine:
    """Load `model` and give it a pool as `cache` says. Raises ModelLoadError or ConfigError.

    `shareable_pool`: other processes of this host can map the pool.
    """
    if cache.page_size < 1:
        raise ConfigError(f"page_size is {cache.page_size}: it must be at least 1.")
    loaded = load_model(model)
    one_page = layout_for(loaded.layers, loaded.dtype_name, page_size=cache.page_size, num_pages=1)
    num_pages = num_pages_for(one_page, cache, loaded.device)
    layout = layout_for(loaded.layers, loaded.dtype_name, page_size=cache.page_size, num_pages=num_pages)
    return BuiltEngine(loaded, KVPool(layout, loaded.device, shareable=shareable_pool))
