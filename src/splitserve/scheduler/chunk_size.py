"""Size of prompt chunks beside decodes: as many prompt tokens as fit into a target for the time of the step.

A chunk delays each request that decodes in the same step. So the steps are measured, and a simple model predicts them:

    time of a step = decode time (number of decodes) + prompt tokens x time of a token (tokens before it)

Both functions are tables of medians. Decode times are those of steps without prompts, by batch size. Token times are
what steps with prompts took beyond that, by context. Both are in powers of two. An entry that is not measured yet is
that of the nearest size. The median of a few values ignores an outlier, and follows a change after a few steps.

Token times depend on the size of the chunk, too: a few tokens cost hardly more than the step without them. So a chunk
is at most twice as long as one that was measured lately, or `UNMEASURED_TOKENS`.

A busy worker may have no step without prompts. If the decode time of a batch size is not known, or old, a step without
prompts measures it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from splitserve.core.batch import StepPlan

# Default target: the time of a step without prompts, and in addition the shorter of two times: that of so many of the
# shortest decode steps, or that of so many prompt tokens. At least `LEAST_TARGET` seconds. docs/scheduling.md has more.
ADDED_DECODE_STEPS = 24
ADDED_TOKENS = 448
LEAST_TARGET = 0.05
# Values in a median, and the least number of values of a known decode time.
NUM_VALUES = 5
_NUM_TO_KNOW = 3
# Steps after which a decode time is measured again.
MAX_AGE = 256
# With fewer prompt tokens a step does not measure the time of a token.
LEAST_TOKENS = 16
# Chunk size up to which the time per token of shorter chunks is used.
UNMEASURED_TOKENS = 128
# Tokens of the first entry of the table by context.
_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step, as its time depends on it."""

    num_decodes: int
    num_prompt_tokens: int = 0
    # Tokens before a chunk, the mean over the step's prompt tokens.
    context: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        num_decodes, num_prompt_tokens, num_before = 0, 0, 0
        for step in plan.requests:
            count = len(step.token_ids)
            if step.is_decode:
                num_decodes += 1
            else:
                num_prompt_tokens += count
                num_before += count * step.start
        return cls(num_decodes, num_prompt_tokens, num_before / num_prompt_tokens if num_prompt_tokens else 0.0)


@dataclass(slots=True)
class _DecodeTime:
    """Decode times of one range of batch sizes, and the number of the last step that was one of them."""

    values: deque[float]
    measured_at: int


class StepTimes:
    """Measured times of steps, and predictions from them."""

    def __init__(self) -> None:
        self._num_steps = 0
        # Both by range, as a power of two.
        self._decode: dict[int, _DecodeTime] = {}
        # (seconds per prompt token, prompt tokens of the step)
        self._token: dict[int, deque[tuple[float, int]]] = {}

    def add(self, work: StepWork, seconds: float) -> None:
        self._num_steps += 1
        if not work.num_prompt_tokens:
            entry = self._decode.setdefault(work.num_decodes.bit_length(), _DecodeTime(deque(maxlen=NUM_VALUES), 0))
            entry.values.append(seconds)
            entry.measured_at = self._num_steps
        elif work.num_prompt_tokens >= LEAST_TOKENS:
            each = max(0.0, seconds - self.decode(work.num_decodes)) / work.num_prompt_tokens
            values = self._token.setdefault(_range_of(work.context), deque(maxlen=NUM_VALUES))
            values.append((each, work.num_prompt_tokens))

    def knows_decode(self, num_decodes: int) -> bool:
        """Return whether the decode time of that batch size is measured, and not old."""
        entry = self._decode.get(num_decodes.bit_length())
        return entry is not None and len(entry.values) >= _NUM_TO_KNOW and self._num_steps - entry.measured_at < MAX_AGE

    def decode(self, num_decodes: int) -> float:
        """Return the seconds of a step of that many decodes. 0: nothing is known."""
        if not num_decodes or not self._decode:
            return 0.0
        return statistics.median(self._decode[_nearest(self._decode, num_decodes.bit_length())].values)

    def shortest_decode(self) -> float:
        """Return the seconds of the shortest decode step of any batch size. 0: nothing is known."""
        return min((statistics.median(entry.values) for entry in self._decode.values()), default=0.0)

    def token(self, context: float) -> tuple[float, int] | None:
        """Return the seconds per prompt token, and the longest chunk that was measured lately. None: unknown."""
        if not self._token:
            return None
        values = self._token[_nearest(self._token, _range_of(context))]
        return statistics.median(each for each, _ in values), max(count for _, count in values)

    def predict(self, work: StepWork) -> float:
        token = self.token(work.context)
        return self.decode(work.num_decodes) + work.num_prompt_tokens * (token[0] if token else 0.0)


class ChunkController:
    """Controller of the prompt tokens of a step. `target`: seconds of a step with decodes; None: the default rule.

    Chunks are multiples of `unit` tokens, and at least one.
    """

    def __init__(self, target: float | None, unit: int) -> None:
        self._target = target
        self._unit = unit
        self._times = StepTimes()
        # For metrics: limit of prompt tokens in the last plan, its target, and times of the last step with both decodes
        # and prompts.
        self._num_tokens = 0
        self._last_target = 0.0
        self._predicted, self._measured = 0.0, 0.0

    def target(self, num_decodes: int, token_time: float) -> float:
        """Return the seconds that a step with so many decodes may take. `token_time`: seconds per prompt token."""
        if self._target is not None:
            return self._target
        added = min(ADDED_DECODE_STEPS * self._times.shortest_decode(), ADDED_TOKENS * token_time)
        return max(LEAST_TARGET, self._times.decode(num_decodes) + added)

    def limit(self, num_decodes: int, context: float, most: int) -> int:
        """Return how many prompt tokens the next step may have, at most `most`.

        `context`: tokens before the first of them. Returns 0 if a step without prompts must be measured first.
        """
        self._num_tokens = self._limit(num_decodes, context, most)
        return self._num_tokens

    def state(self) -> dict[str, Any]:
        """Return the fields of SchedulerState about chunks."""
        return {
            "prefill_chunk_tokens": self._num_tokens,
            "target_step_seconds": self._last_target,
            "mixed_step_predicted_seconds": self._predicted,
            "mixed_step_seconds": self._measured,
        }

    def _limit(self, num_decodes: int, context: float, most: int) -> int:
        token = self._times.token(context)
        if not num_decodes or token is None:
            return most
        each, measured = token
        count = float(max(UNMEASURED_TOKENS, 2 * measured))
        if each > 0:
            self._last_target = self.target(num_decodes, each)
            seconds = self._last_target - self._times.decode(num_decodes)
            count = min(count, max(0.0, seconds) / each)
        if count >= most:
            return most
        if not self._times.knows_decode(num_decodes):
            return 0
        return min(most, max(1, int(count / self._unit)) * self._unit)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Add the measured time of a step, in seconds."""
        work = StepWork.of(plan)
        if work.num_decodes and work.num_prompt_tokens:
            self._predicted, self._measured = self._times.predict(work), seconds
        self._times.add(work, seconds)


def _range_of(context: float) -> int:
    return (int(context) // _CONTEXT).bit_length()


def _nearest(table: Collection[int], key: int) -> int:
    return key if key in table else min(table, key=lambda other: abs(other - key))
