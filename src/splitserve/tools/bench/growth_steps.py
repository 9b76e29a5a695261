"""Step time of the engine alone, in this process: no scheduler, no HTTP.

1. One engine is built over a pool that holds `max_batch` short contexts, or one long one. The pool is filled with
   random numbers: memory that was never written is one page of zeros and would be read from the CPU's cache.
2. A decode step computes one token of each request at the end of its context, and samples the next one.
3. A prompt is computed in chunks, as by the scheduler.

A step is repeated without changes: its token's KV is written to the same slot again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitserve.core.batch import ModelEngine, RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.loader import LoadedModel
from splitserve.tools.bench.series import Series, doublings, measure

_GREEDY = ResolvedSampling(temperature=0.0)
_PAGE_SIZE = 16
# Prompts take long: one run of a prompt per this many runs of a step.
_STEPS_A_PROMPT = 3


@dataclass(frozen=True, slots=True)
class StepSizes:
    repeats: int
    max_batch: int = 256
    # Context tokens of each request while the batch grows, and the first context length of the other series.
    short_context: int = 128
    # Limited to the model's context.
    max_context: int = 8192
    chunk_tokens: int = 2048

    @property
    def pool_tokens(self) -> int:
        return max(self.max_batch * self.short_context, self.max_context)


class StepTimer:
    """Timer of steps.

    Row 0 of the page table is the long request's, over all pages; row 1 + i is that of short request i.
    """

    def __init__(self, built: BuiltEngine, sizes: StepSizes) -> None:
        self._loaded = built.loaded
        self._sizes = sizes
        self.max_context = min(sizes.max_context, built.max_total_tokens_per_request)
        if self.max_context < 2 * sizes.short_context:
            raise ConfigError(
                f"contexts of {self.max_context} tokens are too short to see anything grow: take another model"
            )
        for tensor in (*built.pool.keys.values(), *built.pool.values.values()):
            tensor.normal_()
        pages_each = -(-sizes.short_context // _PAGE_SIZE)
        table = np.zeros((1 + sizes.max_batch, -(-self.max_context // _PAGE_SIZE)), dtype=np.int32)
        table[0] = np.arange(table.shape[1])
        table[1:, :pages_each] = np.arange(sizes.max_batch * pages_each).reshape(-1, pages_each)
        self._engine: ModelEngine = built.runner(table)

    def all_series(self) -> list[Series]:
        return [self.decode_by_batch(), self.decode_by_context(), self.prompt_by_length()]

    def decode_by_batch(self) -> Series:
        def run(size: int) -> float:
            last = self._sizes.short_context - 1
            return self._seconds([self._step(1 + i, last, last + 1) for i in range(size)])

        points = measure(doublings(1, self._sizes.max_batch), float, run, self._sizes.repeats)
        context = f"each with {self._sizes.short_context:,} tokens of context"
        return Series("decode step by batch size", context, "sequences", "sequence", "ms", points)

    def decode_by_context(self) -> Series:
        def run(size: int) -> float:
            return self._seconds([self._step(0, size - 1, size)])

        contexts = doublings(self._sizes.short_context, self.max_context)
        points = measure(contexts, lambda size: size / 1000, run, self._sizes.repeats)
        return Series(
            "decode step by context length", "one sequence", "tokens", "1,000 tokens of context", "ms", points
        )

    def prompt_by_length(self) -> Series:
        chunk = self._sizes.chunk_tokens

        def run(size: int) -> float:
            steps = [self._step(0, begin, min(begin + chunk, size), size) for begin in range(0, size, chunk)]
            return sum(self._seconds([step]) for step in steps)

        lengths = doublings(self._sizes.short_context, self.max_context)
        repeats = max(1, self._sizes.repeats // _STEPS_A_PROMPT)
        points = measure(lengths, lambda size: prompt_flops(self._loaded, size) / 1e9, run, repeats, warm_ups=1)
        conditions = f"one sequence, steps of up to {chunk:,} tokens"
        return Series("prefill by prompt length", conditions, "tokens", "GFLOP", "ms", points)

    def _step(self, row: int, begin: int, end: int, num_tokens: int | None = None) -> RequestStep:
        """Return a step for tokens [begin, end) of a request of `num_tokens`.

        The last token of the request samples the next.
        """
        ids = [(7 * i + row) % self._loaded.vocab_size for i in range(begin, end)]
        sample = SampleSpec(_GREEDY, end, ids, ()) if num_tokens in (None, end) else None
        return RequestStep(f"growth-{row}", row, ids, begin, sample)

    def _seconds(self, steps: Sequence[RequestStep]) -> float:
        plan = StepPlan(tuple(steps))
        began = time.perf_counter()
        self._engine.execute(plan)
        return time.perf_counter() - began


def measure_steps(model: ModelConfig, sizes: StepSizes) -> list[Series]:
    """Measure all series of a model. Raises ModelLoadError or ConfigError."""
    built = build_engine(model, CacheConfig(page_size=_PAGE_SIZE, max_total_tokens=sizes.pool_tokens))
    try:
        return StepTimer(built, sizes).all_series()
    finally:
        built.close()


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
