"""The paged KV pool: the memory of keys and values, in the layout of `core/layout.py`.

1. `num_pages_for` computes how many pages fit the device, `layout_for` returns the layout as plain data.
2. `KVPool` allocates the memory in one piece and splits it into components: the keys of layer 0, its values, and so on.
3. Attention reads and writes it as tensors [num_pages, page_size, num_kv_heads, head_dim]; transports as raw regions.
   A layer with latent attention has one such tensor, of one head, instead of two.
4. `save` copies pages to host memory for a retracted request, `restore` copies them back into other pages.

A draft model's layers are further components of the same pages: a copy or transfer of a page includes its KV. If some
layers have windows (`cache/window_pages.py`), their pool has a share of the pages that the full layers have, but not
more than all requests and steps can use (`WindowDemand`). The copy of a page includes its window page.

The pool does not know which request owns a page. Unwritten memory reads as zero. On a CPU the system provides it when a
token is written into the same 2 MB, or shortly before (`prefault.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]
import torch

from splitserve.cache.pages import kv_to_page_num
from splitserve.cache.shared_pages import SharedPages
from splitserve.cache.window_pages import least_window_pages, window_pages_at_most
from splitserve.core.config import CacheConfig
from splitserve.core.errors import ConfigError
from splitserve.core.layout import DRAFT_PREFIX, LATENT, KVComponent, KVLayout, Region
from splitserve.core.machine import Arena
from splitserve.core.options import size_text
from splitserve.engine import memory_saver
from splitserve.engine.attention.base import PagedKV
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.prefault import Prefault
from splitserve.engine.probe import LayerShape

# Requests of this length fill both pools alike, unless another ratio is configured.
FORESEEN_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class WindowDemand:
    """The most that a worker's scheduler uses of a windowed layers' own pool."""

    # Maximum pages of that pool per page of the full layers' pool. 1: there is one pool. None: from `FORESEEN_TOKENS`.
    full_tokens_ratio: float | None
    # Prompt tokens in all steps in flight.
    step_tokens: int
    max_requests: int
    # Option that requires one pool for all layers whatever the ratio is; None: no such option.
    obstacle: str | None = None

    def num_window_pages(self, num_pages: int, page_size: int, window: int) -> int:
        """Return the window pages beside `num_pages` of the full layers; 0: one pool. `window`: in tokens."""
        ratio = window / FORESEEN_TOKENS if self.full_tokens_ratio is None else self.full_tokens_ratio
        if ratio >= 1.0:
            return 0
        most = self.max_requests * window_pages_at_most(window, page_size) + kv_to_page_num(self.step_tokens, page_size)
        wanted = min(math.ceil(num_pages * ratio), most)
        found = max(wanted, least_window_pages(window, page_size, self.step_tokens))
        return found if found < num_pages else 0


def window_of_some(one_page: KVLayout, ranks: Ranks | None) -> int | None:
    """Return the largest window of a model that has layers with and without one, on this rank or on others.

    None for any other model. Every rank calls it. Raises RanksLostError.
    """
    has_full = any(component.window is None for component in one_page.components)
    largest = max((component.window or 0 for component in one_page.components), default=0)
    if ranks is not None:
        has_full = ranks.least(-int(has_full)) < 0
        largest = -ranks.least(-largest)
    return largest if has_full and largest else None


# Components start at multiples of this many bytes: a page of the operating system, so that they can be registered.
_ALIGNMENT = 4096


def layout_for(
    layers: Sequence[LayerShape], dtype: str, *, page_size: int, num_pages: int, draft: Sequence[LayerShape] = ()
) -> KVLayout:
    """Return the layout of a pool for all of `layers` on this rank, components in the order k0, v0, k1, v1, ...

    The layers of a draft model follow them.
    """
    components = _components(layers, dtype) + _components(draft, dtype, DRAFT_PREFIX)
    return KVLayout(page_size=page_size, num_pages=num_pages, components=tuple(components))


def _components(layers: Sequence[LayerShape], dtype: str, prefix: str = "") -> list[KVComponent]:
    return [
        KVComponent(
            name=prefix + name,
            layer=shape.layer,
            dtype=dtype,
            num_heads=shape.num_kv_heads,
            first_head=shape.first_kv_head,
            total_heads=shape.total_kv_heads or shape.num_kv_heads,
            head_dim=head_dim,
            window=shape.window,
        )
        for shape in layers
        for name, head_dim in ([(LATENT, shape.k_dim)] if shape.is_latent else [("k", shape.k_dim), ("v", shape.v_dim)])
    ]


def num_pages_for(
    one_page: KVLayout,
    cache: CacheConfig,
    device: torch.device,
    num_window_pages: Callable[[int], int] = lambda num_pages: 0,
) -> int:
    """Return the pool's number of pages: `max_total_tokens` rounded up, or what `mem_fraction` of free memory holds.

    `one_page` is a layout of the pool's shape; its numbers of pages do not matter. `num_window_pages` maps a number of
    pages to that of window pages; 0: layers with windows have as many as others. Raises ConfigError if no page fits.
    """
    if cache.max_total_tokens is not None:
        if cache.max_total_tokens < 1:
            raise ConfigError(f"max_total_tokens is {cache.max_total_tokens}: it must be at least 1.")
        return -(-cache.max_total_tokens // cache.page_size)
    fraction = cache.mem_fraction
    if fraction is None:
        # Other processes use a machine's memory, too. On a GPU the rest is for the tensors of steps.
        fraction = 0.85 / cache.workers_per_gpu if device.type == "cuda" else 0.15
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"mem_fraction is {fraction}: it must be in (0, 1].")
    free = _free_memory(device)
    num_pages = most_pages(one_page, int(free * fraction / cache.num_sharers), num_window_pages)
    if num_pages < 1:
        raise ConfigError(
            f"The KV pool does not hold a single page: a page of {cache.page_size} tokens takes "
            f"{size_text(one_page.bytes_per_page)}, and {fraction:.2%} of the {size_text(free)} "
            f"free on {device} is less. Raise mem_fraction, set max_total_tokens, or choose a smaller page_size."
        )
    return num_pages


def most_pages(one_page: KVLayout, num_bytes: int, num_window_pages: Callable[[int], int]) -> int:
    """Return the largest number of pages that fits, with the window pages beside them."""
    windowed = one_page.bytes_per_window_page
    full = one_page.bytes_per_page - windowed
    if not windowed and full:
        return num_bytes // full

    def fits(num_pages: int) -> bool:
        return num_pages * full + (num_window_pages(num_pages) or num_pages) * windowed <= num_bytes

    # `low` pages always fit, and more than `high` never do. A rank without full layers takes the bound of other ranks.
    low, high = num_bytes // one_page.bytes_per_page, num_bytes // full if full else 1 << 31
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _free_memory(device: torch.device) -> int:
    """Return the bytes free on the device now."""
    if device.type == "cuda":
        # Memory that torch caches for later tensors counts as taken, and loading has left some.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of the copy of one page: of the full layers, and of its window page if it has one."""

    full: int
    windowed: int

    def of(self, window_pages: npt.NDArray[np.int64]) -> int:
        """Return the bytes of a copy of as many pages. `window_pages`: -1 for a page without one."""
        return len(window_pages) * self.full + int((window_pages >= 0).sum()) * self.windowed


@dataclass(frozen=True, slots=True)
class PagesCopy:
    """Copy of pages in host memory: [number of pages, page_size, heads, head_dim] of each component, in their order."""

    parts: list[torch.Tensor]
    # The copied window pages of components with windows, and the index of the page that each belongs to.
    window_parts: list[torch.Tensor]
    window_places: npt.NDArray[np.int64]


class KVPool(PagedKV):
    """The memory of one rank's KV cache; PagedKV of the served model.

    `keys[layer]` and `values[layer]`, or `latents[layer]`, are [num_pages, page_size, num_kv_heads, head_dim]. Users of
    `regions()` must be done with them before `close`. `shareable` memory can be mapped by other processes of this host;
    raises ConfigError if the device has no such memory, or if the system refuses it. With `shared` the memory and the
    page numbers are those of a pool of several workers. `has_padding_page`: the tensors hold one more page, number
    `layout.num_pages`, that no request owns: padding rows of a step write there. Regions end before it.
    `is_releasable`: on a GPU, `discard` is possible; elsewhere it always is.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: torch.device,
        *,
        shareable: bool = False,
        shared: SharedPages | None = None,
        has_padding_page: bool = False,
        is_releasable: bool = False,
    ) -> None:
        drafts = tuple(c for c in layout.components if c.name.startswith(DRAFT_PREFIX))
        super().__init__(device, layout.components[: len(layout.components) - len(drafts)])
        # Without a draft model, it has no layers.
        self.draft_token_to_kv_pool = PagedKV(device, drafts)
        self.layout = layout
        self.padding_page = layout.num_pages if has_padding_page else None
        self.window_padding_page = layout.num_window_pages if has_padding_page and layout.num_window_pages > 0 else None
        # Page -> window page, or -1; owned by the scheduler. None: no window pages.
        self.window_table: npt.NDArray[np.int32] | None = None
        # Memory of each component.
        self._regions: list[Region] = []
        # Tensors of components in the windowed layers' own pool, and of all others.
        self._window_parts: list[torch.Tensor] = []
        self._full_parts: list[torch.Tensor] = []
        # Memory of the CPU; None on a device, where the tensors own it.
        num_window_pages = layout.num_window_pages + (self.window_padding_page is not None)
        held = replace(layout, num_pages=layout.num_pages + has_padding_page, num_window_pages=num_window_pages)
        self._arena = _arena(pool_bytes(held), device, shareable, shared)
        if self._arena is None:
            with memory_saver.region() if is_releasable else contextlib.nullcontext():
                memory = torch.zeros(pool_bytes(held), dtype=torch.uint8, device=device)
        else:
            memory = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
        offset = shared.arena_offset if shared else 0
        for component, size, held_size in zip(layout.components, _sizes(layout), _sizes(held), strict=True):
            part = memory[offset : offset + held_size]
            self._add(component, part)
            self._regions.append(self._arena.region(offset, size) if self._arena else Region(part.data_ptr(), size))
            offset += _aligned(held_size)
        # None on a GPU, and for shared pools: the page numbers of a worker do not begin at 0 there.
        self._prefault = None if self._arena is None or shared else self._provided(self._arena)

    def _provided(self, arena: Arena) -> Prefault | None:
        """Return the provider of the memory of all components without window pages. None: all have window pages."""
        first = arena.address
        parts = [
            (region.address - first, region.length, component.page_bytes(self.layout.page_size))
            for component, region in zip(self.layout.components, self._regions, strict=True)
            if not self.layout.has_window_pages(component.window)
        ]
        if not parts:
            return None
        prefault = Prefault(arena, parts)
        prefault.use(0)
        return prefault

    def expect(self, page: int) -> None:
        if self._prefault is not None and page < self.layout.num_pages:
            self._prefault.use(page)

    def _add(self, component: KVComponent, memory: torch.Tensor) -> None:
        shape = (-1, self.layout.page_size, component.num_heads, component.head_dim)
        owner = self.draft_token_to_kv_pool if component.name.startswith(DRAFT_PREFIX) else self
        sides = {"k": owner.keys, "v": owner.values, LATENT: owner.latents}
        part = memory.view(getattr(torch, component.dtype)).view(shape)
        sides[component.name.removeprefix(DRAFT_PREFIX)][component.layer] = part
        (self._window_parts if self.layout.has_window_pages(component.window) else self._full_parts).append(part)

    @property
    def bytes_per_page(self) -> int:
        return self.layout.bytes_per_page

    @property
    def page_bytes(self) -> PageBytes:
        """Return the bytes of the copy of one page of this rank."""
        windowed = self.layout.bytes_per_window_page if self.layout.num_window_pages else 0
        return PageBytes(self.bytes_per_page - windowed, windowed)

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Return the bytes of a copy of the pages."""
        return self.page_bytes.of(self.window_pages(pages))

    def save(self, pages: Sequence[int]) -> PagesCopy:
        """Return a copy of the pages in host memory, outside the pool. Raises MemoryError if there is no room."""
        return self.copy_out(pages, self.window_pages(pages))

    def restore(self, copy: PagesCopy, first: int, pages: Sequence[int]) -> None:
        """Write the pages [first, first + len(pages)) of a copy to `pages`; window pages as far as both have them."""
        self.copy_in(copy, first, pages, self.window_pages(pages))

    def drop(self, copy: PagesCopy) -> None:
        """Do nothing: a copy is freed with the last reference to it."""

    def copy_out(self, pages: Sequence[int] | npt.NDArray[np.int64], window_pages: npt.NDArray[np.int64]) -> PagesCopy:
        """Copy pages as `save` does. `window_pages`: the window page of each, -1 if it has none."""
        places = np.flatnonzero(window_pages >= 0)
        index = torch.tensor(pages, device=self.device)
        window_index = torch.tensor(window_pages[places], device=self.device)
        try:
            parts = [part.index_select(0, index).cpu() for part in self._full_parts]
            window_parts = [part.index_select(0, window_index).cpu() for part in self._window_parts]
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return PagesCopy(parts, window_parts, places)

    def copy_in(
        self,
        copy: PagesCopy,
        first: int,
        pages: Sequence[int] | npt.NDArray[np.int64],
        window_pages: npt.NDArray[np.int64],
    ) -> None:
        """Copy pages back as `restore` does. `window_pages`: the window page of each, -1 if it has none."""
        index = torch.tensor(pages, device=self.device)
        for part, saved in zip(self._full_parts, copy.parts, strict=True):
            part.index_copy_(0, index, saved[first : first + len(pages)].to(self.device))
        rows = np.flatnonzero((copy.window_places >= first) & (copy.window_places < first + len(pages)))
        rows = rows[window_pages[copy.window_places[rows] - first] >= 0]
        window_index = torch.tensor(window_pages[copy.window_places[rows] - first], device=self.device)
        for part, saved in zip(self._window_parts, copy.window_parts, strict=True):
            part.index_copy_(0, window_index, saved[torch.from_numpy(rows)].to(self.device))

    def window_pages(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the window page of each page; -1 if it has none."""
        if self.window_table is None:
            return np.full(len(pages), -1, np.int64)
        return self.window_table[list(pages)].astype(np.int64)

    def regions(self) -> tuple[Region, ...]:
        """Return the memory regions; region i is component i of the layout."""
        return tuple(self._regions)

    def discard(self) -> None:
        """Return the memory to the system until it is used again. The content is lost. Raises OSError."""
        if self._arena is None:
            memory_saver.pause()
        else:
            if self._prefault is not None:
                self._prefault.forget()
            self._arena.discard()

    def resume(self) -> None:
        """Make discarded memory usable again. It reads as zeros."""
        if self._arena is None:
            memory_saver.resume()
            for part in (*self._full_parts, *self._window_parts):
                part.zero_()

    def close(self) -> None:
        """Release the memory; it returns to the system with the last tensor that refers to it. Idempotent."""
        draft = self.draft_token_to_kv_pool
        for side in (self.keys, self.values, self.latents, draft.keys, draft.values, draft.latents):
            side.clear()
        for tensors in (self._window_parts, self._full_parts, self._regions):
            tensors.clear()
        if self._prefault is not None:
            self._prefault.close()
        self._arena = self._prefault = None


def pool_bytes(layout: KVLayout) -> int:
    """Return the bytes of a pool of this layout."""
    return sum(_aligned(size) for size in _sizes(layout))


def _sizes(layout: KVLayout) -> list[int]:
    return [layout.num_pages_of(c) * c.page_bytes(layout.page_size) for c in layout.components]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _arena(num_bytes: int, device: torch.device, shareable: bool, shared: SharedPages | None) -> Arena | None:
    """Return zeroed CPU memory, which the system allocates page by page on first write; None on other devices."""
    if device.type != "cpu":
        if shared:
            raise ConfigError(
                f"The KV pool is on {device}, and other processes can map memory of the CPU only: "
                "choose another transfer backend than shm, or --device cpu."
            )
        return None
    try:
        if shared is not None:
            return Arena.attach(os.dup(shared.fd))
        # With pages of 4 KB, translating addresses takes a third of the time of decode attention.
        return Arena(num_bytes, shareable=shareable, huge=True)
    except OSError as error:
        raise ConfigError(
            f"The system refuses {size_text(num_bytes)} for the KV pool ({error}). "
            "Lower mem_fraction or max_total_tokens."
        ) from error
