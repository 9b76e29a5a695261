"""Proposer for the fake engine that mixes right and wrong draft tokens by a seeded random generator."""

from __future__ import annotations

import random
from collections.abc import Sequence

from splitserve.core.batch import RequestStep
from splitserve.core.errors import EngineError
from support.fake_engine import expected_tokens


class RandomProposer:
    """Proposer of draft tokens that are right with probability `accuracy`.

    If `moody`, it sometimes proposes fewer tokens or none, or fails.
    """

    def __init__(self, rng: random.Random, accuracy: float = 0.8, *, moody: bool = True) -> None:
        self._rng = rng
        self._accuracy = accuracy
        self._moody = moody

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        if self._moody and self._rng.random() < 0.05:
            raise EngineError("not in the mood")
        return [self._guess(step, room) for step, room in zip(steps, rooms, strict=True)]

    def _guess(self, step: RequestStep, room: int) -> list[int]:
        spec = step.sample
        assert spec is not None
        if self._moody and self._rng.random() < 0.2:
            room = self._rng.randint(0, room)
        known = len(spec.output_ids)
        right = expected_tokens(spec.prompt_ids, spec.params, known + room)[known:]
        return [token if self._rng.random() < self._accuracy else token + 1 for token in right]
