"""Baseline in a process of its own: transformers' `generate` with its own cache, all prompts in one batch.

Times are those at which `generate` has finished a step's tokens, without HTTP. Prompts of unequal length are padded on
the left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from splitserve.tools.bench.stats import StreamRecord


class _StepClock:
    """Stopping criterion that never stops, and records when each step is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        # Reading a token waits for the device.
        input_ids[0, -1].item()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_batch(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[StreamRecord]:
    """Generate greedily with EOS suppressed, so that every prompt gets `max_tokens` tokens."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    clock = _StepClock()
    sent_at = time.perf_counter()
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [StreamRecord(sent_at, clock.times, len(p), len(clock.times)) for p in prompts]


def serve_baseline(connection: Connection, folder: str, dtype: str, threads: int) -> None:
    """Answer messages (prompts, max_tokens) with their records until the connection is closed."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    with suppress(EOFError):
        while True:
            connection.send(run_batch(model, *connection.recv()))
