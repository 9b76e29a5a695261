"""Reference for parity tests: transformers' own greedy `generate`, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from splitserve.core.sampling import mix64

# Prompt lengths around the boundaries of pages (16) and chunks (64, 2048), from one token to three thousand.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 80, 127, 128, 129, 200, 257, 513, 2049, 3000)
# The KV of this many tokens crosses a page boundary (16) for every prompt length.
NUM_OUTPUT_TOKENS = 20
# Output tokens in `make soak`.
NUM_SOAK_TOKENS = 64


class Reference(Protocol):
    def __call__(self, prompt: Sequence[int], num_tokens: int = NUM_OUTPUT_TOKENS) -> list[int]: ...


def greedy_reference(model: Any) -> Reference:
    """Return a function from a prompt to the tokens that `model` (a causal LM) generates, with EOS suppressed."""
    answers: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def answer(prompt: Sequence[int], num_tokens: int = NUM_OUTPUT_TOKENS) -> list[int]:
        key = (num_tokens, tuple(prompt))
        if key not in answers:
            ids = torch.tensor([list(prompt)])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
            answers[key] = out[0, len(prompt) :].tolist()
        return answers[key]

    return answer


def uniform_at(seed: int, position: int, choice: int = 0) -> float:
    """Return the uniform variate in [0, 1) of one of the choices that lead to the token at position `position`."""
    return (mix64(mix64(seed, position), choice) >> 11) * 2.0**-53
