"""The KV cache's layout in memory, as data. Resharding needs two layouts and a token range, nothing else.

A pool is a list of components, one memory region each: the keys of layer 0, the values of layer 0, and so on. Inside a
component page p is at byte offset p x page_bytes. A page consists of rows, head_dim elements of one token of one
head: [page_size, num_heads] of them if the axes are NHD, [num_heads, page_size] if they are HND.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Components of a draft model's layers are called "draft_k", "draft_v" and so on.
DRAFT_PREFIX = "draft_"
# Component of a layer with multi-head latent attention: one row per token, the source of every head's key and value.
LATENT = "latent"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def check_kv_dtype(dtype: str) -> None:
    """Raise ValueError if `dtype` is not one that a KV pool or a KV transfer can have."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"KV dtype {dtype!r} is unknown: use one of {', '.join(DTYPE_BYTES)}")


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One region of the pool: one kind of tensor of one layer. (name, layer) is unique in a pool."""

    # "k" or "v"; "latent" for MLA, of one head, which every rank holds. Names of a draft model begin with DRAFT_PREFIX.
    name: str
    # Global layer number.
    layer: int
    dtype: str
    # KV heads held by this rank, the global number of the first one, and the number of heads of the model.
    num_heads: int
    first_head: int
    total_heads: int
    head_dim: int
    # Order inside a page: tokens then heads, or heads then tokens.
    axes: Literal["NHD", "HND"] = "NHD"
    # Sliding window: the token at position p attends to positions > p - window. None: to all before it.
    window: int | None = None

    def __post_init__(self) -> None:
        check_kv_dtype(self.dtype)

    @property
    def heads(self) -> range:
        """Global numbers of the heads held."""
        return range(self.first_head, self.first_head + self.num_heads)

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.num_heads * self.head_dim * DTYPE_BYTES[self.dtype]


def first_token_read(window: int | None, num_tokens: int) -> int:
    """Return the first of `num_tokens` computed tokens that the next step, at position `num_tokens`, reads."""
    return 0 if window is None else max(0, num_tokens - window + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool of one rank. Component i is memory region i of the rank's transport.

    If only some layers of a model have sliding windows, these may have a smaller pool of their own. Its pages are
    window pages, with their own numbers; each has the tokens of one page of the full layers' pool.
    """

    page_size: int
    num_pages: int
    components: tuple[KVComponent, ...]
    # Pages of each component with a window; 0: there is one pool, and they have as many pages as the others.
    num_window_pages: int = 0

    def has_window_pages(self, window: int | None) -> bool:
        """Return whether a component with `window` is in the windowed layers' pool."""
        return window is not None and self.num_window_pages > 0

    def num_pages_of(self, component: KVComponent) -> int:
        return self.num_window_pages if self.has_window_pages(component.window) else self.num_pages

    @property
    def window(self) -> int | None:
        """Largest window of all layers, tokens; None: some layer attends to all tokens."""
        windows = [component.window for component in self.components]
        return None if None in windows else max((w for w in windows if w is not None), default=None)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all components, window page included."""
        return sum(c.page_bytes(self.page_size) for c in self.components)

    @property
    def bytes_per_window_page(self) -> int:
        """Bytes of one page over the components with windows."""
        return sum(c.page_bytes(self.page_size) for c in self.components if c.window is not None)

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_page // self.page_size


@dataclass(frozen=True, slots=True)
class Region:
    """A range of this process's memory that a transport may read and write. Owned by the pool that returned it."""

    address: int
    length: int
    # File descriptor of the memory and its offset there, if processes on the same host may map it (`core/machine.py`);
    # -1: private. The arena owns the descriptor.
    fd: int = -1
    fd_offset: int = 0
