"""Paged attention in plain torch: gather the pages, then `scaled_dot_product_attention`. Runs on every device.

A step may have requests of both kinds:

- One new token (decode): requests of similar length form a group; their pages are gathered to [B, L] with padding,
  and one masked call serves the group. The query heads that share a KV head become that head's query rows, so keys are
  never repeated.
- Several new tokens (a prompt or a chunk of one): one by one, in blocks of query rows, each against its visible keys.
  KV heads are on the batch dimension; query heads that share one are on the head dimension, by stride 0.

Latents (`engine/mla.py`) are keys and values in one. A row is gathered once and weighted as a whole, because the fused
kernel needs keys and values of one size; the surplus of the result is cut off.

Sliding windows reduce what is gathered to the pages with a visible key. Padding repeats pages of the same request, and
the unwritten end of a request's last page is zeroed when the page is begun. So no data of a page's former owner, not
even a NaN, reaches another request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from splitserve.engine.attention.base import AttentionParams, IntArray, PagedBatch, PagedKV
from splitserve.engine.inputs import to_device

# Query rows per block: so few that little of a block's keys is masked, so many that the kernel stays busy.
_BLOCK = 256
# One-token requests with pages for at most this many tokens share a group, whatever their lengths.
_SMALLEST_GROUP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Group:
    """One-token requests of similar length. B requests, P pages each, padded."""

    # Indices of their tokens in the step. [B]
    rows: torch.Tensor
    # [B x P]
    pages: torch.Tensor
    # Added to the scores: 0 if the key is visible, else -inf. [B, 1, 1, P x page_size]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Segment:
    """One request with several new tokens."""

    # The pages with visible keys: a range if they follow each other in the pool, else their numbers.
    pages: slice | torch.Tensor
    # Query rows of the step, and the gathered keys that they are computed against, aligned at their ends.
    blocks: tuple[tuple[slice, slice], ...]


class TorchSdpaBackend:
    """AttentionBackend over one pool."""

    def __init__(self, pool: PagedKV, *, widen: bool = False) -> None:
        """`widen`: compute in float32 whatever the pool's dtype, because the device is slow in that dtype."""
        self.pool = pool
        self.compute_dtype = torch.float32 if widen else dtype_of(pool)
        self._masks: dict[int | None, torch.Tensor] = {}

    def plan(self, batch: PagedBatch) -> TorchSdpaStep:
        return TorchSdpaStep(self, batch)

    def causal_mask(self, window: int | None, num_queries: int, num_keys: int) -> torch.Tensor:
        """Return a mask: entry (-i, -j) is 0 if the i-th last query attends to the j-th last key, else -inf.

        [num_queries, num_keys], aligned to 16 bytes; at most _BLOCK queries. Kept between steps, because every lower
        right corner of a causal mask is one, too.
        """
        mask = self._masks.get(window)
        if mask is None or mask.shape[1] < num_keys:
            width = max(_BLOCK, 1 << (num_keys - 1).bit_length())
            device = self.pool.device
            keys = torch.arange(-width, 0, device=device)
            distance = torch.arange(-_BLOCK, 0, device=device)[:, None] - keys[None, :]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(_BLOCK, width, dtype=self.compute_dtype, device=device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask
        corner = mask[_BLOCK - num_queries :, mask.shape[1] - num_keys :]
        # Torch's kernels for GPUs read 16 bytes at once. Torch checks the mask's strides for that, but not its address.
        return corner if corner.data_ptr() % 16 == 0 else corner.clone(memory_format=torch.contiguous_format)


class TorchSdpaStep:
    """StepAttention in torch. What depends on a layer's window is computed for the first such layer, then shared."""

    # Requests with no more new tokens than this are computed token by token, by `_attend_singles`.
    longest_single = 1

    def __init__(self, backend: TorchSdpaBackend, batch: PagedBatch) -> None:
        self.pool = backend.pool
        self.pool.expect(max(int(pages[-1]) for pages in batch.pages))
        self.batch = batch
        self._backend = backend
        self._dtype = backend.compute_dtype
        # Key: whether a layer's pages are those of the windowed layers' own pool.
        self._slots: dict[bool, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # By window.
        self._groups: dict[int | None, list[_Group]] = {}
        self._segments: dict[int | None, list[_Segment]] = {}

    def slots_for(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the flat slots in which layers with `window` store this step's tokens [T], and those to zero.

        These are behind the last token of pages that are begun. None: no page is.
        """
        is_windowed = self.batch.is_windowed(window)
        if is_windowed not in self._slots:
            pages = self.batch.pages_for(window)
            new, tails = (
                to_device(slots, self.pool.device)
                for slots in (new_slots(self.batch, pages), _begun_tails(self.batch, pages))
            )
            self._slots[is_windowed] = new, tails if len(tails) else None
        return self._slots[is_windowed]

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        keys, values = self._store_new(layer, key, value, params)
        num_kv_heads = key.shape[1]
        # [T, num_kv_heads, query heads per KV head, k_dim]
        query = query.reshape(len(query), num_kv_heads, -1, query.shape[-1])
        out = query.new_empty(*query.shape[:3], values.shape[-1])
        self._attend_singles(query, keys, values, params, out)
        self._attend_prompts(query, keys, values, params, out)
        return out.flatten(1, 2)[..., : value.shape[-1]]

    def _attend_prompts(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, out: torch.Tensor
    ) -> None:
        """Fill the rows of requests with several new tokens."""
        window = params.window
        if window not in self._segments:
            self._segments[window] = [self._segment(request, window) for request in self.with_prompts]
        for segment in self._segments[window]:
            k = _gather(keys, segment.pages).transpose(0, 1).to(self._dtype)
            v = k if values is keys else _gather(values, segment.pages).transpose(0, 1).to(self._dtype)
            for rows, visible in segment.blocks:
                mask = self._backend.causal_mask(window, rows.stop - rows.start, visible.stop - visible.start)
                q = query[rows].permute(1, 2, 0, 3).to(self._dtype)
                seen_k, seen_v = (states[:, None, visible].expand(-1, q.shape[1], -1, -1) for states in (k, v))
                out[rows] = _attend(q, seen_k, seen_v, mask, params).permute(2, 0, 1, 3)

    def _store_new(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values; return the layer's keys and values in the pool, which are the same for latents."""
        if params.is_latent:
            latents = self.pool.latents[layer]
            self._store(latents, key, params.window)
            return latents, latents
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self._store(keys, key, params.window)
        self._store(values, value, params.window)
        return keys, values

    def _attend_singles(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, out: torch.Tensor
    ) -> None:
        """Fill the rows of requests with one new token. query, out: [T, num_kv_heads, heads per KV head, dim]."""
        window = params.window
        if window not in self._groups:
            singles = np.flatnonzero(self.batch.lengths == 1)
            self._groups[window] = [self._group(m, window) for m in _by_length(self.batch, singles, window)]
        for group in self._groups[window]:
            shape = (len(group.rows), -1, query.shape[1])
            k = _gather(keys, group.pages).view(*shape, keys.shape[-1]).transpose(1, 2).to(self._dtype)
            if values is keys:
                v = k
            else:
                v = _gather(values, group.pages).view(*shape, values.shape[-1]).transpose(1, 2).to(self._dtype)
            q = query.index_select(0, group.rows).to(self._dtype)
            out.index_copy_(0, group.rows, _attend(q, k, v, group.mask, params).to(out.dtype))

    def _store(self, pages: torch.Tensor, new: torch.Tensor, window: int | None) -> None:
        flat, (slots, tails) = pages.flatten(0, 1), self.slots_for(window)
        flat.index_copy_(0, slots, new)
        if tails is not None:
            flat.index_fill_(0, tails, 0.0)

    @cached_property
    def with_prompts(self) -> list[int]:
        """Requests with several new tokens, by their index in the step."""
        members: list[int] = np.flatnonzero(self.batch.lengths > self.longest_single).tolist()
        return members

    def _group(self, members: IntArray, window: int | None) -> _Group:
        batch, page_size, pages = self.batch, self.batch.page_size, self.batch.pages_for(window)
        first_pages = first_visible(batch.starts[members], window) // page_size
        visible = [pages[r][first:] for r, first in zip(members.tolist(), first_pages.tolist(), strict=True)]
        width = max(len(p) for p in visible)
        padded = np.stack([np.concatenate((p, np.repeat(p[:1], width - len(p)))) for p in visible])
        positions = first_pages[:, None] * page_size + np.arange(width * page_size)
        own = batch.starts[members][:, None]
        hidden = positions > own
        if window is not None:
            hidden |= positions <= own - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self.pool.device)
        mask.masked_fill_(to_device(hidden, self.pool.device), -torch.inf)
        return _Group(
            rows=to_device(batch.offsets[members], self.pool.device),
            pages=to_device(padded.reshape(-1), self.pool.device),
            mask=mask[:, None, None, :],
        )

    def _segment(self, request: int, window: int | None) -> _Segment:
        batch = self.batch
        start, length, offset = (int(values[request]) for values in (batch.starts, batch.lengths, batch.offsets))
        first_page = int(first_visible(np.array(start), window)) // batch.page_size
        base = first_page * batch.page_size
        blocks = []
        for begin in range(start, start + length, _BLOCK):
            end = min(begin + _BLOCK, start + length)
            seen_from = int(first_visible(np.array(begin), window))
            blocks.append((slice(offset + begin - start, offset + end - start), slice(seen_from - base, end - base)))
        pages = batch.pages_for(window)[request][first_page:]
        in_a_row = bool((np.diff(pages) == 1).all())
        where = slice(int(pages[0]), int(pages[-1]) + 1) if in_a_row else to_device(pages, self.pool.device)
        return _Segment(where, tuple(blocks))


def dtype_of(pool: PagedKV) -> torch.dtype:
    """Return the dtype of all layers of the pool."""
    dtype: torch.dtype = getattr(torch, pool.components[0].dtype)
    return dtype


def new_slots(batch: PagedBatch, pages_of: Sequence[IntArray]) -> IntArray:
    """Return the slot (page x page_size + offset in it) of every new token, in the pool of these pages. [T]"""
    size = batch.page_size
    slots = []
    for start, length, pages in zip(batch.starts, batch.lengths, pages_of, strict=True):
        positions = np.arange(start, start + length)
        slots.append(pages[positions // size] * size + positions % size)
    return np.concatenate(slots)


def _begun_tails(batch: PagedBatch, pages_of: Sequence[IntArray]) -> IntArray:
    """Return the slots behind the last token in each request's last page, if this step is the first to write to it."""
    size = batch.page_size
    tails = [np.zeros(0, np.int64)]
    for start, length, pages in zip(batch.starts.tolist(), batch.lengths.tolist(), pages_of, strict=True):
        used = (start + length - 1) % size + 1
        if used < size and used <= length:
            tails.append(pages[-1] * size + np.arange(used, size))
    return np.concatenate(tails)


def first_visible(positions: IntArray, window: int | None) -> IntArray:
    """Return the position of the first token that the token at `positions` attends to."""
    return np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)


def _by_length(batch: PagedBatch, requests: IntArray, window: int | None) -> list[IntArray]:
    """Return requests in groups with padded lengths that differ by less than a factor of two."""
    seen = batch.starts[requests] + 1 - first_visible(batch.starts[requests], window)
    bucket = np.ceil(np.log2(np.maximum(seen, _SMALLEST_GROUP_TOKENS))).astype(np.int64)
    return [requests[bucket == b] for b in np.unique(bucket)]


def _gather(pool: torch.Tensor, pages: slice | torch.Tensor) -> torch.Tensor:
    """Return the keys or values of these pages. [number of pages x page_size, num_kv_heads, dim]"""
    if isinstance(pages, slice):
        return pool[pages].flatten(0, 1)
    # Pages as rows of a matrix: one memcpy per page. On CPUs, indexing the 4-d tensor is 30 times slower.
    return pool.flatten(1).index_select(0, pages).view(-1, *pool.shape[2:])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Return softmax(q k^T x scaling + mask) v, all [batch, heads, length, dim]."""
    if params.softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=params.scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * params.scaling
    scores = torch.tanh(scores / params.softcap) * params.softcap + mask
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)
