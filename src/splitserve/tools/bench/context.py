"""`splitserve bench context`: prefill and decode of a long context, compared with their limits.

1. A small random model with that context length. Its weights are few, so attention takes most of the time.
2. Prefill: a prompt of `SHORT_TOKENS` in one chunk, then the long one in chunks. The floating-point operations of both
   predict the time of the long one from that of the short one.
3. Decode: one step of a sequence with a short and with the long context, both with cold caches. The difference reads
   the KV between them. The limit is the throughput of a plain read of memory in the same run, by as many threads.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.machine import num_cores
from splitserve.engine.build import build_engine
from splitserve.tools.bench.engine_steps import PAGE_SIZE, EngineSteps, decode_gb, prompt_flops
from splitserve.tools.bench.machine_limits import READ_BYTES, read_gb_per_s
from splitserve.tools.bench.options import ContextBenchOptions
from splitserve.tools.bench.report import Report, ReportTable, Target, milliseconds, text_of
from splitserve.tools.bench.stats import median

_NO_DIFFERENCE = (
    "Decode was no slower with the long context than with the short one, so the throughput of its KV is unknown: give "
    "more --tokens or --repeats, on an idle machine."
)
# Arguments of transformers' LlamaConfig, besides the context length.
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# Tokens of a chunk and of the short prompt, from which the long one is predicted; context of the short decode step.
SHORT_TOKENS = 2048
DECODE_TOKENS = 128
# Targets: time over prediction, and share of the read throughput.
MAX_PREFILL, LEAST_DECODE = 1.5, 0.8
_PREFILL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ContextFigures:
    tokens: int
    # Seconds of prompts and decode steps.
    short_prefill: float
    long_prefill: float
    short_decode: float
    long_decode: float
    # Floating-point operations of the long prompt over those of the short one.
    flops_ratio: float
    # KV that the long decode step reads beyond the short one, and throughput of a plain read, in 10^9 bytes.
    kv_gb: float
    read_gb_per_s: float


def bench_context(options: ContextBenchOptions, console: Console) -> Report:
    """Measure and return the report. Raises ModelLoadError."""
    threads = options.threads or num_cores()
    with console.status("long contexts"), tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder:
        _write_model(Path(folder), options.tokens)
        model = ModelConfig(model=folder, dtype=options.dtype, device="cpu", threads=threads)
        figures = measure_context(model, options.tokens, options.repeats)
    return context_report(options, threads, figures)


def _write_model(folder: Path, tokens: int) -> None:
    """Write a random checkpoint, so that it is loaded like any other."""
    import torch
    import transformers

    torch.manual_seed(0)
    # The console shows the status of this benchmark.
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=tokens)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure_context(model: ModelConfig, tokens: int, repeats: int) -> ContextFigures:
    """Measure one model, which has a context of `tokens`; its long prompt once. Raises ModelLoadError."""
    cache = CacheConfig(page_size=PAGE_SIZE, max_total_tokens=tokens)
    with closing(build_engine(model, cache)) as built:
        steps = EngineSteps(built, long_tokens=tokens, num_short=1, short_tokens=DECODE_TOKENS)

        def decode(size: int) -> float:
            return _median_of(lambda: steps.seconds(steps.part(size - 1, size, size)), repeats)

        short_prompt = steps.prompt(SHORT_TOKENS, SHORT_TOKENS)
        return ContextFigures(
            tokens=tokens,
            short_prefill=_median_of(lambda: steps.seconds(*short_prompt), _PREFILL_REPEATS),
            long_prefill=steps.seconds(*steps.prompt(tokens, SHORT_TOKENS)),
            short_decode=decode(DECODE_TOKENS),
            long_decode=decode(tokens),
            flops_ratio=prompt_flops(steps.loaded, tokens) / prompt_flops(steps.loaded, SHORT_TOKENS),
            kv_gb=decode_gb(0, built.layout, 1, tokens) - decode_gb(0, built.layout, 1, DECODE_TOKENS),
            read_gb_per_s=read_gb_per_s(READ_BYTES),
        )


def _median_of(run: Callable[[], float], repeats: int) -> float:
    """Return the median of `repeats` runs, each with cold caches, after one that warms up."""
    block = np.ones(READ_BYTES // 8)
    return median([(block.sum(), run())[1] for _ in range(1 + repeats)][1:])


def context_report(options: ContextBenchOptions, threads: int, f: ContextFigures) -> Report:
    """Return the report. JSON has times in seconds."""
    predicted, kv_seconds = f.short_prefill * f.flops_ratio, f.long_decode - f.short_decode
    # A disturbed machine may have the longer step in less time.
    kv_gb_per_s = f.kv_gb / kv_seconds if kv_seconds > 0 else math.nan
    targets = [
        Target("prefill / predicted", f.long_prefill / predicted, MAX_PREFILL, is_at_most=True),
        Target("decode KV / read throughput", kv_gb_per_s / f.read_gb_per_s, LEAST_DECODE, is_at_most=False),
    ]
    figures = {
        "dtype": options.dtype,
        "threads": threads,
        "tokens": f.tokens,
        "prefill_seconds": {"short": f.short_prefill, "long": f.long_prefill, "predicted": predicted},
        "decode_seconds": {"short": f.short_decode, "long": f.long_decode},
        "kv_gb_per_s": kv_gb_per_s,
        "read_gb_per_s": f.read_gb_per_s,
        "targets": [target.to_json() for target in targets],
    }
    rows = [
        [text_of(show, figures) for show in texts] + target.texts()
        for texts, target in zip(_ROWS, targets, strict=True)
    ]
    return Report(
        title=f"A context of {f.tokens:,} tokens",
        setting=f"a random model of {SHAPE['num_hidden_layers']} layers in {options.dtype}, {threads} threads",
        legend=f"The KV of decode is that beyond {DECODE_TOKENS} tokens, in the time beyond such a step "
        f"({milliseconds(f.short_decode)} ms).",
        figures=figures,
        tables=[ReportTable(["", "measured", "limit", "ratio", "target", ""], rows)],
        remarks=[_NO_DIFFERENCE] if kv_seconds <= 0 else [],
    )


_ROWS = (
    (
        "prefill, {tokens:,} tokens",
        "{prefill_seconds.long:ms} ms",
        f"{{prefill_seconds.predicted:ms}} ms predicted from {SHORT_TOKENS:,} ({{prefill_seconds.short:ms}} ms)",
    ),
    (
        "decode, {tokens:,} tokens",
        "{decode_seconds.long:ms} ms; {kv_gb_per_s:.1f} GB/s of KV",
        "{read_gb_per_s:.1f} GB/s of a plain read",
    ),
)
