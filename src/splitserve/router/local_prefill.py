"""How much of a request's prompts a decode worker would have to compute, were it to serve the request alone. Pure.

What it has cached is what its KV events told, nothing that is only expected of it: prompts that come at once, each
counting on the first, would be computed there one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.router.worker import Worker


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """One prompt of a request."""

    num_tokens: int
    # Hashes of its whole blocks, by block size; empty: nobody's blocks are known.
    hashes: Mapping[int, Sequence[int]] = field(default_factory=dict)


def num_uncached_tokens(decode: Worker, prompts: Sequence[PromptBlocks]) -> int:
    """Of the prompt of which that is most. The last token is always computed."""
    return max((max(1, prompt.num_tokens - _num_cached(decode, prompt)) for prompt in prompts), default=0)


def _num_cached(decode: Worker, prompt: PromptBlocks) -> int:
    prefixes = decode.prefixes
    return 0 if prefixes is None else prefixes.told_match(prompt.hashes.get(prefixes.block_size, ()))
