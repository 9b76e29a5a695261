"""Proposals for the fake engine that are right for a while and then wrong, as the seed wants it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from splitserve.core.batch import RequestStep
from splitserve.errors import EngineError
from splitserve.testing.fake_engine import expected_tokens


class Guesser:
    """Proposer. Each guess is right with probability `accuracy`; sometimes it offers few, none, or fails."""

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
