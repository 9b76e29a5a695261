"""Steps of the engine alone, in this process, for benchmarks: no scheduler, no HTTP. And the work of a step.

The pool is filled with random numbers: memory that was never written is one page of zeros and would be read from the
CPU's cache. A step is repeated without changes: its token's KV is written to the same slot again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splitserve.core.batch import ModelEngine, RequestStep, SampleSpec, StepPlan
from splitserve.core.layout import KVLayout
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine
from splitserve.engine.loader import LoadedModel
from splitserve.tools.bench.stats import seconds_of

PAGE_SIZE = 16
_GREEDY = ResolvedSampling(temperature=0.0)


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


class EngineSteps:
    """Engine with one long request in row 0 of its page table, and short requests in the other rows.

    The long one and the short ones use the same pages, so only one kind may be in a step.
    """

    def __init__(self, built: BuiltEngine, *, long_tokens: int, num_short: int, short_tokens: int) -> None:
        self.loaded = built.loaded
        for tensor in (*built.pool.keys.values(), *built.pool.values.values()):
            tensor.normal_()
        pages_each = pages_of(short_tokens)
        table = np.zeros((1 + num_short, max(pages_each, pages_of(long_tokens))), dtype=np.int32)
        table[0] = np.arange(table.shape[1])
        table[1:, :pages_each] = np.arange(num_short * pages_each).reshape(-1, pages_each)
        self._engine: ModelEngine = built.runner(table)
        self._short_tokens = short_tokens

    def decode(self, batch: int) -> StepPlan:
        """Return a step that computes the last token of `batch` short requests."""
        return StepPlan(
            tuple(self._step(1 + i, self._short_tokens - 1, self._short_tokens, is_last=True) for i in range(batch))
        )

    def part(self, begin: int, end: int, num_tokens: int) -> StepPlan:
        """Return a step for tokens [begin, end) of a long request of `num_tokens`."""
        return StepPlan((self._step(0, begin, end, is_last=end == num_tokens),))

    def prompt(self, num_tokens: int, chunk_tokens: int) -> list[StepPlan]:
        """Return the steps of a long request's prompt."""
        begins = range(0, num_tokens, chunk_tokens)
        return [self.part(begin, min(begin + chunk_tokens, num_tokens), num_tokens) for begin in begins]

    def seconds(self, *plans: StepPlan) -> float:
        """Execute steps and return the seconds that they took."""
        return seconds_of(lambda: [self._engine.execute(plan) for plan in plans])

    def _step(self, row: int, begin: int, end: int, *, is_last: bool) -> RequestStep:
        """Return a request's part of a step. The last token of a request samples the next."""
        ids = [(7 * i + row) % self.loaded.vocab_size for i in range(begin, end)]
        return RequestStep(f"bench-{row}", row, ids, begin, SampleSpec(_GREEDY, end, ids, ()) if is_last else None)


def prompt_flops(loaded: LoadedModel, num_tokens: int) -> float:
    """Return the floating-point operations of a prompt: those of the weights and of attention.

    Each weight takes two per token. All weights are counted, so the number is an upper bound for a mixture of experts.
    """
    embedding = loaded.model.get_input_embeddings().weight.numel()
    is_tied = loaded.model.config.get_text_config().tie_word_embeddings
    weights = float(loaded.num_parameters - embedding * (1 if is_tied else 2))
    num_heads = int(loaded.model.config.get_text_config().num_attention_heads)
    attention = 0.0
    for layer in loaded.layers:
        window = min(layer.window or num_tokens, num_tokens)
        # Pairs of a query and a visible key: a triangle, then rows of the window's width.
        pairs = window * (window + 1) / 2 + (num_tokens - window) * window
        attention += 2 * pairs * num_heads * (layer.k_dim + layer.v_dim)
    return 2 * weights * num_tokens + attention


def weight_bytes(model: Any) -> int:
    """Return the bytes that every step reads: all weights but the input embeddings, where it reads only a few rows."""
    parameters = {id(p): p for p in model.parameters()}
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        del parameters[id(embedding)]
    return sum(p.numel() * p.element_size() for p in parameters.values())


def decode_gb(num_weight_bytes: int, layout: KVLayout, batch: int, context: int) -> float:
    """Return the number of bytes that a decode step must access, in 10^9 bytes.

    These are all weights once, and the KV of `context` tokens per request. A layer with a window reads only its last
    tokens.
    """
    of_request = sum(
        c.page_bytes(layout.page_size) // layout.page_size * min(context, c.window or context)
        for c in layout.components
    )
    return (num_weight_bytes + batch * of_request) / 1e9
