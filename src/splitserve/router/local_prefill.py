"""Number of prompt tokens that a decode worker would compute if it served a request alone. Pure.

Only blocks that the worker reported in KV events count as cached; expected blocks do not. Otherwise, of several prompts
with one prefix that arrive at once, each would count the prefix as cached. The decode worker would then compute all of
them, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.router.worker import Worker


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """One prompt of a request."""

    num_tokens: int
    # Hashes of its whole blocks, by block size in tokens. Empty: no worker's blocks are known.
    hashes: Mapping[int, Sequence[int]] = field(default_factory=dict)


def num_uncached_tokens(decode: Worker, prompts: Sequence[PromptBlocks]) -> int:
    """Return the uncached tokens of the prompt that has most of them. The last token of a prompt is always computed."""
    return max((max(1, prompt.num_tokens - _num_cached(decode, prompt)) for prompt in prompts), default=0)


def _num_cached(decode: Worker, prompt: PromptBlocks) -> int:
    prefixes = decode.prefixes
    return 0 if prefixes is None else prefixes.told_match(prompt.hashes.get(prefixes.block_size, ()))
