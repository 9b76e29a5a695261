"""Prompts of exact lengths from English words in random order. Pure.

Each word of the stock is one token, so that a prompt has the same length as text and as token ids. If a tokenizer has
too few such words, prompts are token ids only. No two prompts share a prefix, so that no prefix cache helps, except
prompts of the same blocks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Sequence

import msgspec

from splitserve.tools.passage import PASSAGE

Encode = Callable[[str], Sequence[int]]
# Minimum number of words, so that prompts differ early.
_MIN_WORDS = 50


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    ids: list[int]
    # Text that encodes to `ids`. Empty: the tokenizer has too few words of one token.
    text: str


class PromptMaker:
    """Maker of prompts. Equal seeds give equal prompts."""

    def __init__(self, encode: Encode, seed: int = 0) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        # (token id, its text)
        self._stock = _single_tokens(encode) or [(token, "") for token in sorted(set(encode(PASSAGE)))]

    def make(self, num_tokens: int) -> Prompt:
        return self._prompt(self._random.choices(self._stock, k=num_tokens))

    def make_of_blocks(self, keys: Sequence[Hashable], block_tokens: int, num_tokens: int) -> Prompt:
        """Return a prompt of blocks.

        Equal keys give equal blocks in all prompts. Tokens beyond the last block are new.
        """
        words: list[tuple[int, str]] = []
        for key in keys[: -(-num_tokens // block_tokens)]:
            # A string gives the same random numbers in every process.
            words += random.Random(f"{self._seed}:{key}").choices(self._stock, k=block_tokens)
        words += self._random.choices(self._stock, k=max(0, num_tokens - len(words)))
        return self._prompt(words[:num_tokens])

    def _prompt(self, words: Sequence[tuple[int, str]]) -> Prompt:
        return Prompt(ids=[token for token, _ in words], text="".join(text for _, text in words))


def _single_tokens(encode: Encode) -> list[tuple[int, str]]:
    """Return the words that are one token each at any position. Empty: there are too few."""
    stock = []
    for word in sorted(set(re.findall(r"[a-z]+", PASSAGE.lower()))):
        ids = list(encode(f" {word}"))
        if len(ids) == 1:
            stock.append((ids[0], f" {word}"))
    together = list(encode("".join(text for _, text in stock)))
    return stock if len(stock) >= _MIN_WORDS and together == [token for token, _ in stock] else []
