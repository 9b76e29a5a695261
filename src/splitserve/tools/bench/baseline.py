"""Baseline in a process of its own: transformers' `generate` with its own cache, one batch per job.

Reads JSON lines from standard input: a BaselineModel, then jobs. It answers each job with one line, a list of
StreamRecords. The times are those at which `generate` has finished a step's tokens, without HTTP. Prompts of unequal
length are padded on the left.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from splitserve.tools.bench.stats import StreamRecord


class BaselineModel(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    dtype: str
    threads: int


class BaselineJob(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts in one batch, each answered with `max_tokens` tokens."""

    # Token ids.
    prompts: list[list[int]]
    max_tokens: int


class _StepClock:
    """Stopping criterion that never stops, and records when each step is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        # Reading a token waits for the device.
        input_ids[0, -1].item()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_job(model: Any, job: BaselineJob) -> list[StreamRecord]:
    """Run a job greedily with EOS suppressed, so that every prompt gets `max_tokens` tokens."""
    width = max(len(p) for p in job.prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in job.prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in job.prompts])
    clock = _StepClock()
    sent_at = time.perf_counter()
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=job.max_tokens,
        min_new_tokens=job.max_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [StreamRecord(sent_at, clock.times, len(p), len(clock.times)) for p in job.prompts]


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=BaselineModel)
    torch.set_num_threads(task.threads)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=getattr(torch, task.dtype)).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    for line in sys.stdin.buffer:
        records = run_job(model, msgspec.json.decode(line, type=BaselineJob))
        sys.stdout.buffer.write(msgspec.json.encode(records) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
