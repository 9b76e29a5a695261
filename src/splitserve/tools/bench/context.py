"""`splitserve bench context`: prefill and decode of a long context, compared with their limits.

1. A small random model with that context length. Its weights are few, so attention takes most of the time.
2. Prefill: a prompt of `SHORT_TOKENS` in one chunk, then the long one in chunks. The floating-point operations of both
   predict the time of the long one from that of the short one.
3. Decode: one step of a sequence with a short and with the long context. The difference reads the KV of the tokens
   between them. The limit is the throughput of a plain read of memory in the same run, by as many threads.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.core.batch import StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.machine import num_cores
from splitserve.engine.build import build_engine
from splitserve.tools.bench.engine_steps import PAGE_SIZE, EngineSteps, decode_gb, prompt_flops
from splitserve.tools.bench.machine_limits import READ_BYTES, read_gb_per_s
from splitserve.tools.bench.options import ContextBenchOptions
from splitserve.tools.bench.report import OthersWatch, Report, ReportTable, milliseconds
from splitserve.tools.bench.stats import median

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

    @property
    def prefill_excess(self) -> float:
        """Return the time of the long prompt over its prediction."""
        return self.long_prefill / (self.short_prefill * self.flops_ratio)

    @property
    def kv_gb_per_s(self) -> float:
        return self.kv_gb / (self.long_decode - self.short_decode)

    @property
    def decode_share(self) -> float:
        return self.kv_gb_per_s / self.read_gb_per_s


def bench_context(options: ContextBenchOptions, console: Console) -> Report:
    """Measure and return the report. Raises ModelLoadError."""
    others, threads = OthersWatch(), options.threads or num_cores()
    with console.status("long contexts"), tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder:
        _write_model(Path(folder), options.tokens)
        model = ModelConfig(model=folder, dtype=options.dtype, device="cpu", threads=threads)
        figures = measure_context(model, options.tokens, options.repeats)
    return context_report(options, threads, figures, others.cores_taken())


def _write_model(folder: Path, tokens: int) -> None:
    """Write a random checkpoint, so that it is loaded like any other."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=tokens)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure_context(model: ModelConfig, tokens: int, repeats: int) -> ContextFigures:
    """Measure one model, which has a context of `tokens`. Raises ModelLoadError."""
    cache = CacheConfig(page_size=PAGE_SIZE, max_total_tokens=tokens)
    with closing(build_engine(model, cache)) as built:
        steps = EngineSteps(built, long_tokens=tokens, num_short=1, short_tokens=DECODE_TOKENS)

        def prompt(size: int) -> list[StepPlan]:
            return [steps.part(i, min(i + SHORT_TOKENS, size), size) for i in range(0, size, SHORT_TOKENS)]

        def seconds(plans: Iterable[StepPlan]) -> float:
            began = time.perf_counter()
            for plan in plans:
                steps.execute(plan)
            return time.perf_counter() - began

        def decode(size: int) -> float:
            plan = [steps.part(size - 1, size, size)]
            return _median_of(lambda: seconds(plan), repeats)

        return ContextFigures(
            tokens=tokens,
            short_prefill=_median_of(lambda: seconds(prompt(SHORT_TOKENS)), _PREFILL_REPEATS),
            # It is long enough to be measured once.
            long_prefill=seconds(prompt(tokens)),
            short_decode=decode(DECODE_TOKENS),
            long_decode=decode(tokens),
            flops_ratio=prompt_flops(steps.loaded, tokens) / prompt_flops(steps.loaded, SHORT_TOKENS),
            kv_gb=decode_gb(0, built.layout, 1, tokens) - decode_gb(0, built.layout, 1, DECODE_TOKENS),
            read_gb_per_s=read_gb_per_s(READ_BYTES),
        )


def _median_of(run: Callable[[], float], repeats: int) -> float:
    """Return the median of `repeats` runs after one that warms up."""
    run()
    return median([run() for _ in range(repeats)])


def context_report(options: ContextBenchOptions, threads: int, figures: ContextFigures, cores_taken: float) -> Report:
    """Return the report. JSON has times in seconds."""
    f, tokens = figures, f"{figures.tokens:,} tokens"
    is_prefill_met, is_decode_met = f.prefill_excess <= MAX_PREFILL, f.decode_share >= LEAST_DECODE
    predicted = f.short_prefill * f.flops_ratio
    rows = [
        [
            f"prefill, {tokens}",
            f"{milliseconds(f.long_prefill)} ms",
            f"{milliseconds(predicted)} ms predicted from {SHORT_TOKENS:,} ({milliseconds(f.short_prefill)} ms)",
            f"{f.prefill_excess:.2f}",
            f"at most {MAX_PREFILL:g}",
            _verdict(is_prefill_met),
        ],
        [
            f"decode, {tokens}",
            f"{milliseconds(f.long_decode)} ms; {f.kv_gb_per_s:.1f} GB/s of KV",
            f"{f.read_gb_per_s:.1f} GB/s of a plain read",
            f"{f.decode_share:.2f}",
            f"at least {LEAST_DECODE:g}",
            _verdict(is_decode_met),
        ],
    ]
    return Report(
        title=f"A context of {tokens}",
        setting=f"a random model of {SHAPE['num_hidden_layers']} layers in {options.dtype}, {threads} threads",
        cores_taken_by_others=cores_taken,
        legend=f"The KV of decode is that beyond {DECODE_TOKENS} tokens, in the time beyond such a step "
        f"({milliseconds(f.short_decode)} ms).",
        figures={
            "dtype": options.dtype,
            "threads": threads,
            "tokens": f.tokens,
            "prefill_seconds": {"short": f.short_prefill, "long": f.long_prefill, "predicted": predicted},
            "decode_seconds": {"short": f.short_decode, "long": f.long_decode},
            "kv_gb_per_s": f.kv_gb_per_s,
            "read_gb_per_s": f.read_gb_per_s,
            "targets": [
                {"target": "prefill / predicted", "limit": MAX_PREFILL, "measured": f.prefill_excess}
                | {"met": is_prefill_met},
                {"target": "decode KV / read throughput", "limit": LEAST_DECODE, "measured": f.decode_share}
                | {"met": is_decode_met},
            ],
        },
        tables=[ReportTable(["", "measured", "limit", "ratio", "target", ""], rows)],
    )


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "not met"
