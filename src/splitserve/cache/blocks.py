"""Arithmetic between tokens, slots and pages. Slot s lies in page s // page_size at offset s % page_size."""

from __future__ import annotations


def kv_to_page_num(num_tokens: int, page_size: int) -> int:
    """Return the pages needed to hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
