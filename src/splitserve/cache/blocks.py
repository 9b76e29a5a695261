"""Arithmetic between tokens, slots and pages. Slot s lies in page s // page_size at offset s % page_size."""

from __future__ import annotations

from collections.abc import Sequence


def kv_to_page_num(num_tokens: int, page_size: int) -> int:
    """Pages needed to hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def kv_to_page_indices(kv_indices: Sequence[int], page_size: int) -> list[int]:
    """Page numbers of a sequence's token slots: one page for each `page_size` slots, taken from the first slot of each.

    The slots must be those of consecutive tokens starting at a page border, as a page table lays them out.
    """
    return [slot // page_size for slot in kv_indices[::page_size]]
