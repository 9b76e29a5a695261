"""Changes of logits before sampling, by request parameters: bias, penalties, the min-tokens mask.

Each changes few tokens of few rows. The host collects them as (row, token, amount) triples over the whole batch, and
the device applies each kind in one operation. A batch without any of them is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from splitserve.core.batch import SampleSpec
from splitserve.engine.upload import to_device


class _Entries:
    """A list of (row, token, amount) triples."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._amounts: list[np.ndarray] = []

    def add(self, row: int, tokens: np.ndarray, amounts: np.ndarray | float) -> None:
        self._rows.append(np.full(len(tokens), row, dtype=np.int64))
        self._tokens.append(tokens.astype(np.int64))
        self._amounts.append(np.broadcast_to(np.asarray(amounts, dtype=np.float32), len(tokens)))

    def apply(self, logits: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return logits with change(value, amount) in place of each listed value. No (row, token) may occur twice."""
        if not self._rows:
            return logits
        rows, tokens, amounts = (
            to_device(np.concatenate(parts), logits.device) for parts in (self._rows, self._tokens, self._amounts)
        )
        return logits.index_put((rows, tokens), change(logits[rows, tokens], amounts))


def adjust(logits: torch.Tensor, specs: Sequence[SampleSpec], eos_token_ids: frozenset[int]) -> torch.Tensor:
    """Return a copy of logits [n, vocab_size] with `specs[i]` applied to row i, in the order of SamplingParams."""
    bias, repetition, occurrence, masked = _Entries(), _Entries(), _Entries(), _Entries()
    for row, spec in enumerate(specs):
        p = spec.params
        if p.logit_bias:
            bias.add(row, np.array(list(p.logit_bias)), np.array(list(p.logit_bias.values())))
        if p.repetition_penalty != 1.0:
            repetition.add(row, np.unique([*spec.prompt_ids, *spec.output_ids]), p.repetition_penalty)
        if (p.frequency_penalty or p.presence_penalty) and spec.output_ids:
            tokens, counts = np.unique(spec.output_ids, return_counts=True)
            occurrence.add(row, tokens, counts * p.frequency_penalty + p.presence_penalty)
        # With a grammar the bitmask does this (bitmask.py), because a complete grammar must be able to end.
        if spec.num_output_tokens < p.min_new_tokens and spec.grammar is None:
            ending = set(p.stop_token_ids) | (set() if p.ignore_eos else eos_token_ids)
            masked.add(row, np.array(sorted(ending)), 0.0)
    logits = bias.apply(logits, torch.add)
    logits = repetition.apply(logits, lambda value, penalty: torch.where(value > 0, value / penalty, value * penalty))
    logits = occurrence.apply(logits, torch.sub)
    return masked.apply(logits, lambda value, _: torch.full_like(value, -torch.inf))
