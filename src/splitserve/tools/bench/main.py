"""`splitserve bench main`: colocated, disaggregated and plain transformers under the same load, in one run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from splitserve.core.machine import num_cores
from splitserve.engine.sources import float_model, resolve_model
from splitserve.tools.bench.options import MainBenchOptions
from splitserve.tools.bench.report import Report
from splitserve.tools.bench.scenarios import (
    PromptBatch,
    ScenarioRow,
    ServerFigures,
    measure_server,
    scenario_table,
    server_of,
)
from splitserve.tools.bench.stats import streams_figures, ttft_figures
from splitserve.tools.bench.systems import encoder_of, transformers_server

# Prompt tokens of a stream, and seconds for one run.
_PROMPT_TOKENS, _TIMEOUT = 128, 3600.0
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
            PromptBatch(f"{n} stream{'s' if n > 1 else ''}", n, _PROMPT_TOKENS, output_tokens, runs, streams_figures)
            for n, runs in streams.items()
        ),
        *(PromptBatch(f"{n:,} tokens", 1, n, 1, runs, ttft_figures) for n, runs in ttft.items()),
    ]


# About ten minutes with a model of 135M parameters on two cores.
FULL = _plan(128, streams={1: 3, 8: 2, 32: 1}, ttft={1024: 3, 2048: 3})
# Some three minutes.
QUICK = _plan(16, streams={1: 1, 8: 1, 32: 1}, ttft={1024: 1, 2048: 1})


def bench_main(options: MainBenchOptions, console: Console) -> Report:
    """Measure all systems and return the report, which has failed if a system failed. Raises ConfigError."""
    plan = QUICK if options.quick else FULL
    folder = float_model(resolve_model(options.model))
    servers = [
        *(server_of(name, options, plan) for name in ("colocated", "disaggregated")),
        transformers_server("transformers", folder, options.dtype, num_cores()),
    ]
    encode = encoder_of(folder)
    return main_report(options, plan, [measure_server(s, plan, encode, _TIMEOUT, console) for s in servers])


def main_report(options: MainBenchOptions, plan: Sequence[PromptBatch], systems: Sequence[ServerFigures]) -> Report:
    """Return the report. JSON has times in seconds and throughput in tokens/s."""
    shape = f"{plan[0].input_tokens} prompt and {plan[0].output_tokens} output tokens"
    runs = [
        f"{b.num_runs} for TTFT at {b.input_tokens}"
        if b.output_tokens == 1
        else f"{b.num_runs} at {b.num_prompts} stream(s)"
        for b in plan
    ]
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
                    "streams": system.having("num_streams"),
                    "ttft": system.having("ttft_median"),
                    "cores_taken_by_others": system.cores_taken_by_others,
                }
                for system in systems
            ],
        },
        has_others=True,
        tables=[scenario_table(plan, _ROWS, systems)],
        legend=_LEGEND.format(shape=shape, runs=", ".join(runs)),
        remarks=[remark for system in systems for remark in system.remarks()],
        failed=any(system.problems() for system in systems),
    )


_ROWS: list[ScenarioRow] = [
    ("output tokens/s", "num_streams", "{output_tokens_per_second:.1f}"),
    ("ITL, ms", "num_streams", "{itl_mean:ms} / {itl_p50:ms} / {itl_p99:ms}"),
    ("TPOT, ms", "num_streams", "{tpot_median:ms}"),
    ("TTFT, ms", "ttft_median", "{ttft_median:ms} ({ttft_min:ms}-{ttft_max:ms})"),
]
