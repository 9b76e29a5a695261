"""`splitserve bench main`: throughput and TTFT on this machine, in one run.

Colocated, disaggregated and plain transformers start, warm up, are measured and stop, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.options import MainBenchOptions
from splitserve.tools.bench.report import Report, ReportTable, milliseconds, run_bench
from splitserve.tools.bench.scenarios import (
    PromptBatch,
    ScenarioRow,
    ServerFigures,
    measure_server,
    our_system,
    scenario_rows,
)
from splitserve.tools.bench.stats import StreamsFigures, TtftFigures
from splitserve.tools.bench.systems import Server, TransformersSystem, encoder_of

_PROMPT_TOKENS = 128
# Seconds for one run of a scenario.
_TIMEOUT = 3600.0
_LEGEND = (
    "Streams of {shape}, all sent at once, prompts of random words (no prefix hits). Served systems are measured at an "
    "HTTP client of the router; transformers runs `generate` on one batch, without HTTP. One system at a time. "
    "Runs: {runs}; medians of them. ITL: mean / p50 / p99. TPOT: median. TTFT: median (min-max), one prompt at a time "
    "on an idle system."
)


def _plan(output_tokens: int, streams: dict[int, int], ttft: dict[int, int]) -> list[PromptBatch]:
    """Return the scenarios. `streams`, `ttft`: number of runs by the number of streams, and by prompt tokens."""
    return [
        *(
            PromptBatch(f"{n} stream{'s' if n > 1 else ''}", n, _PROMPT_TOKENS, output_tokens, runs, StreamsFigures.of)
            for n, runs in streams.items()
        ),
        *(PromptBatch(f"{n:,} tokens", 1, n, 1, runs, TtftFigures.of) for n, runs in ttft.items()),
    ]


# About ten minutes with a model of 135M parameters on two cores.
FULL = _plan(128, streams={1: 3, 8: 2, 32: 1}, ttft={1024: 3, 2048: 3})
# About two minutes.
QUICK = _plan(16, streams={1: 1, 8: 1, 32: 1}, ttft={1024: 1, 2048: 1})


def run_main_bench(options: MainBenchOptions) -> int:
    """Run the benchmark and return the exit code: 1 if a system failed. Raises ConfigError."""
    plan = QUICK if options.quick else FULL

    def measure(console: Console) -> Report:
        folder = resolve_model(options.model)
        servers: list[Server] = [
            *(our_system(name, options, plan) for name in ("colocated", "disaggregated")),
            TransformersSystem("transformers", folder, options.dtype, num_cores()),
        ]
        encode = encoder_of(folder)
        return main_report(options, plan, [measure_server(s, plan, encode, _TIMEOUT, console) for s in servers])

    return run_bench(options, measure)


def main_report(options: MainBenchOptions, plan: Sequence[PromptBatch], systems: Sequence[ServerFigures]) -> Report:
    """Return the report. JSON has times in seconds and throughput in tokens/s."""
    shape = f"{plan[0].input_tokens} prompt and {plan[0].output_tokens} output tokens"
    runs = [
        f"{b.num_runs} for TTFT at {b.input_tokens}"
        if b.output_tokens == 1
        else f"{b.num_runs} at {b.num_prompts} stream(s)"
        for b in plan
    ]
    remarks = [problem for system in systems for problem in system.problems()]
    return Report(
        title=f"Throughput and TTFT of {options.model} in {options.dtype}",
        figures={
            "model": options.model,
            "dtype": options.dtype,
            "stream_shape": shape,
            "systems": [
                {
                    "name": system.name,
                    "threads": system.threads,
                    "streams": [asdict(o) for o in system.outcomes.values() if isinstance(o, StreamsFigures)],
                    "ttft": [asdict(o) for o in system.outcomes.values() if isinstance(o, TtftFigures)],
                    "cores_taken_by_others": system.cores_taken_by_others,
                }
                for system in systems
            ],
        },
        tables=[ReportTable.by_column([system.name for system in systems], scenario_rows(plan, _ROWS), systems)],
        legend=_LEGEND.format(shape=shape, runs=", ".join(runs)),
        remarks=remarks,
        failed=bool(remarks),
    )


def _ttft(f: TtftFigures) -> str:
    return f"{milliseconds(f.ttft_median)} ({milliseconds(f.ttft_min)}-{milliseconds(f.ttft_max)})"


_ROWS: list[ScenarioRow] = [
    ("output tokens/s", StreamsFigures, lambda f: f"{f.output_tokens_per_second:.1f}"),
    ("ITL, ms", StreamsFigures, lambda f: " / ".join(map(milliseconds, (f.itl_mean, f.itl_p50, f.itl_p99)))),
    ("TPOT, ms", StreamsFigures, lambda f: milliseconds(f.tpot_median)),
    ("TTFT, ms", TtftFigures, _ttft),
]
