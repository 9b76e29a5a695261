"""Test for a batch of prompts in a field of a body."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_batch(prompt: object) -> TypeGuard[list[Any]]:
    """Return whether `prompt` is a list of prompts. A text or a list of token ids is one prompt, and [] is none."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
