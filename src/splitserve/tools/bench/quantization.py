"""`splitserve bench quantization`: perplexity of a text, and agreement with the reference, for each quantization.

1. The text is one prompt of the engine, in this process. Each position predicts the next token of the text.
2. Perplexity is e to the mean negative logprob of these tokens.
3. Agreement is the share of positions with the likeliest token of the reference. Deltas are absolute differences
   of the logprobs of the text's tokens.
4. A decode step of one request is timed: the median of many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from splitserve.core.batch import InputLogprobSpec, ModelEngine, RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.fit import model_config
from splitserve.engine.quantized.schemes import scheme_of
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.engine_steps import PAGE_SIZE, EngineSteps, pages_of
from splitserve.tools.bench.options import QuantizationBenchOptions
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.stats import mean, median
from splitserve.tools.bench.systems import encoder_of
from splitserve.tools.passage import text_of_option

_DECODE_STEPS = 100
# Context of the timed decode steps, in tokens.
_CONTEXT = 128
_LEGEND = (
    "Perplexity of the text: lower is better. Greedy tokens: share of positions with the same likeliest token as the "
    "reference, which is the first row. Logprob delta: of the text's tokens. Decode step: of one request, median."
)


@dataclass(frozen=True, slots=True)
class TextScore:
    """Result of one model over the text."""

    name: str
    # Per position: logprob of the text's next token, and the likeliest token.
    logprobs: Sequence[float]
    likeliest: Sequence[int]
    # Seconds of a decode step of one request.
    decode_seconds: float

    def figures(self, reference: TextScore) -> dict[str, Any]:
        """Return the figures, as in JSON."""
        deltas = [abs(a - b) for a, b in zip(self.logprobs, reference.logprobs, strict=True)]
        return {
            "name": self.name,
            "perplexity": math.exp(-mean(self.logprobs)),
            "greedy_agreement": mean(a == b for a, b in zip(self.likeliest, reference.likeliest, strict=True)),
            "mean_logprob_delta": mean(deltas),
            "max_logprob_delta": max(deltas),
            "decode_step_s": self.decode_seconds,
        }


def bench_quantization(options: QuantizationBenchOptions, console: Console) -> Report:
    """Score the text by all variants and return the report. Raises ConfigError, ModelLoadError."""
    ids = _ids_of(options)
    scores = []
    for name, config in _variants(options):
        with console.status(f"scoring {len(ids)} tokens by {name}"):
            scores.append(_score(name, config, ids))
    return quantization_report(options, len(ids), scores)


def quantization_report(options: QuantizationBenchOptions, num_tokens: int, scores: Sequence[TextScore]) -> Report:
    """Return the report. The first score is the reference."""
    figures = [score.figures(scores[0]) for score in scores]
    return Report(
        title=f"Accuracy of quantized weights: {options.model}",
        setting=f"{options.model}, a text of {num_tokens} tokens",
        legend=_LEGEND,
        figures={"model": options.model, "tokens": num_tokens, "variants": figures},
        tables=[ReportTable.by_row(_COLUMNS, figures)],
    )


_COLUMNS: Cells[dict[str, Any]] = (
    ("weights", "{name}"),
    ("perplexity", "{perplexity:.2f}"),
    ("greedy tokens", "{greedy_agreement:.1%}"),
    ("logprob delta, mean", "{mean_logprob_delta:.3f}"),
    ("max", "{max_logprob_delta:.2f}"),
    ("decode step, ms", "{decode_step_s:ms.1f}"),
)


def _ids_of(options: QuantizationBenchOptions) -> list[int]:
    """Return the tokens of the text. Raises ConfigError."""
    text = text_of_option(options.text)
    ids = list(encoder_of(resolve_model(options.model))(text))
    if options.reference is not None and list(encoder_of(resolve_model(options.reference))(text)) != ids:
        raise ConfigError(f"--reference {options.reference} has another tokenizer than {options.model}")
    if len(ids) < 2:
        raise ConfigError(f"--text {options.text} has {len(ids)} tokens: give a longer text")
    return ids


def _variants(options: QuantizationBenchOptions) -> list[tuple[str, ModelConfig]]:
    """Return the name and config of each, the reference first."""
    scheme = scheme_of(model_config(resolve_model(options.model)), options.model)

    config = partial(ModelConfig, dtype="bfloat16", device="cpu", threads=options.threads)
    base = options.reference or options.model
    if scheme is None:
        found = [(f"{base}, bfloat16", config(model=base))]
        return found + [
            (f"{options.model}, {q}", config(model=options.model, quantization=q)) for q in ("int8", "w8a8")
        ]
    reference = (f"{base}, bfloat16", config(model=base, kernels="auto" if options.reference else "torch"))
    return [reference, (f"{options.model}, {scheme.name}", config(model=options.model))]


def _score(name: str, config: ModelConfig, ids: Sequence[int]) -> TextScore:
    num_tokens = (pages_of(len(ids)) + pages_of(_CONTEXT)) * PAGE_SIZE
    with closing(build_engine(config, CacheConfig(page_size=PAGE_SIZE, max_total_tokens=num_tokens))) as built:
        table = np.arange(pages_of(len(ids)), dtype=np.int32)[None]
        return TextScore(name, *_score_text(built.runner(table), ids), _decode_seconds(built))


def _score_text(engine: ModelEngine, ids: Sequence[int]) -> tuple[list[float], list[int]]:
    asked = InputLogprobSpec(0, ids[1:], num_top_logprobs=1)
    sample = SampleSpec(ResolvedSampling(temperature=0.0), len(ids), ids, ())
    plan = StepPlan((RequestStep("text", 0, list(ids), 0, sample, input_logprobs=asked),))
    found = engine.execute(plan).requests[0].input_logprobs
    return [scored.logprob for scored in found], [scored.top[0][0] for scored in found]


def _decode_seconds(built: BuiltEngine) -> float:
    steps = EngineSteps(built, long_tokens=PAGE_SIZE, num_short=1, short_tokens=_CONTEXT)
    plan = steps.decode(1)
    return median([steps.seconds(plan) for _ in range(_DECODE_STEPS)])
