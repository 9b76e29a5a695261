"""Load of a benchmark: jobs created once, with the same prompts for all systems. Pure."""

from __future__ import annotations

import msgspec

from splitserve.tools.bench.prompts import Encode, PromptMaker


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts sent at once, each answered with `max_tokens` tokens."""

    # Token ids. No two prompts of a benchmark share a prefix, so that no prefix cache helps.
    prompts: list[list[int]]
    max_tokens: int


class MeasurementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of work in a measurement."""

    # Number of streams at once -> number of runs.
    streams: dict[int, int]
    stream_prompt_tokens: int = 128
    stream_output_tokens: int = 128
    # Prompt tokens -> number of runs, with one output token each on an otherwise idle system.
    ttft: dict[int, int]

    def jobs(self, encode: Encode) -> list[Job]:
        """Return the jobs in the order of `streams`, then of `ttft`, with all runs of one kind in sequence."""
        prompts = PromptMaker(encode)
        jobs = [
            Job(
                prompts=[prompts.make(self.stream_prompt_tokens).ids for _ in range(count)],
                max_tokens=self.stream_output_tokens,
            )
            for count, runs in self.streams.items()
            for _ in range(runs)
        ]
        jobs += [
            Job(prompts=[prompts.make(length).ids], max_tokens=1)
            for length, runs in self.ttft.items()
            for _ in range(runs)
        ]
        return jobs

    def warm_up(self, encode: Encode) -> list[Job]:
        """Return the jobs before the measurement: one long prompt, then a few short ones together."""
        prompts = PromptMaker(encode, seed=1)
        return [
            Job(prompts=[prompts.make(min(self.ttft)).ids], max_tokens=2),
            Job(prompts=[prompts.make(self.stream_prompt_tokens).ids for _ in range(4)], max_tokens=8),
        ]


# About ten minutes with a model of 135M parameters on two cores.
FULL = MeasurementPlan(streams={1: 3, 8: 2, 32: 1}, ttft={1024: 3, 2048: 3})
# About two minutes.
QUICK = MeasurementPlan(streams={1: 1, 8: 1, 32: 1}, stream_output_tokens=16, ttft={1024: 1, 2048: 1})
