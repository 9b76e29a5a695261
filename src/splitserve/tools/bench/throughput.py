"""`splitserve bench main`: throughput and TTFT on this machine, in one run.

1. The prompts are created, the same for every system.
2. Colocated, disaggregated and plain transformers start, warm up, are measured and stop, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import check_dtype
from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.machine import OthersWatch
from splitserve.tools.bench.report import Report, ReportOutput, ReportTable, milliseconds
from splitserve.tools.bench.stats import StreamRecord, StreamsFigures, TtftFigures
from splitserve.tools.bench.systems import ServedSystem, System, TransformersSystem
from splitserve.tools.bench.workload import MeasurementPlan

_LEGEND = (
    "Streams of {shape}, all sent at once, prompts of random words (no prefix hits). Served systems are measured at an "
    "HTTP client of the router; transformers runs `generate` on one batch, without HTTP. One system at a time. "
    "Runs: {runs}; medians of them. ITL: mean / p50 / p99. TPOT: median. TTFT: median (min-max), one prompt at a time "
    "on an idle system."
)


@dataclass(frozen=True, slots=True)
class SystemFigures:
    name: str
    threads: str
    streams: Sequence[StreamsFigures]
    ttft: Sequence[TtftFigures]
    # Average number of cores that processes other than the measured system and its client kept busy.
    cores_taken_by_others: float


def run_main_bench(command: str, model: str, dtype: str, plan: MeasurementPlan, output: ReportOutput) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError, ClusterError, RequestFailedError."""
    check_dtype(dtype)

    def run(console: Console) -> Report:
        folder = resolve_model(model)
        systems = measure(_systems(model, dtype, folder, plan), plan, Tokenizer.load(folder), console)
        return main_report(command, model, dtype, plan, systems)

    return output.run(run)


def measure(
    systems: Sequence[System], plan: MeasurementPlan, tokenizer: Tokenizer, console: Console
) -> list[SystemFigures]:
    """Measure one system after the other. Raises SplitserveError."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    jobs, warm_up = plan.jobs(encode), plan.warm_up(encode)
    figures = []
    for system in systems:
        others = OthersWatch()
        results = system.run(warm_up, jobs, console)
        figures.append(summarize(system, plan, results, others.cores_taken()))
    return figures


def summarize(
    system: System, plan: MeasurementPlan, results: Sequence[list[StreamRecord]], cores_taken_by_others: float
) -> SystemFigures:
    """Return the figures of a system. `results` are in the order of the plan's jobs."""
    remaining = iter(results)
    streams = [StreamsFigures.of([next(remaining) for _ in range(runs)]) for runs in plan.streams.values()]
    ttft = [TtftFigures.of(length, [next(remaining)[0] for _ in range(runs)]) for length, runs in plan.ttft.items()]
    return SystemFigures(system.name, system.threads, streams, ttft, cores_taken_by_others)


def main_report(
    command: str, model: str, dtype: str, plan: MeasurementPlan, systems: Sequence[SystemFigures]
) -> Report:
    """Return the report. JSON has times in seconds and throughput in tokens/s."""
    shape = f"{plan.stream_prompt_tokens} prompt and {plan.stream_output_tokens} output tokens"
    runs = [f"{count} at {num_streams} stream(s)" for num_streams, count in plan.streams.items()]
    runs += [f"{count} for TTFT at {length}" for length, count in plan.ttft.items()]
    return Report(
        title=f"Throughput and TTFT of {model} in {dtype}",
        command=command,
        figures={
            "model": model,
            "dtype": dtype,
            "stream_shape": shape,
            "systems": [asdict(system) for system in systems],
        },
        tables=[ReportTable(["", *(system.name for system in systems)], _rows(systems))],
        legend=_LEGEND.format(shape=shape, runs=", ".join(runs)),
    )


def _rows(systems: Sequence[SystemFigures]) -> list[list[str]]:
    """Return one row per figure: its name, then its value for each system."""
    rows: list[list[str]] = []
    for of_streams in zip(*(system.streams for system in systems), strict=True):
        count = of_streams[0].num_streams
        name = f"{count} stream{'s' if count > 1 else ''}"
        rows.append([f"{name}: output tokens/s", *(f"{f.output_tokens_per_second:.1f}" for f in of_streams)])
        rows.append([f"{name}: ITL, ms", *map(_itl, of_streams)])
        rows.append([f"{name}: TPOT, ms", *(milliseconds(f.tpot_median) for f in of_streams)])
    for of_length in zip(*(system.ttft for system in systems), strict=True):
        rows.append([f"{of_length[0].num_prompt_tokens:,} tokens: TTFT, ms", *map(_ttft, of_length)])
    rows.append(["CPU threads", *(system.threads for system in systems)])
    rows.append(["cores taken by others", *(f"{system.cores_taken_by_others:.1f}" for system in systems)])
    return rows


def _itl(f: StreamsFigures) -> str:
    return " / ".join(map(milliseconds, (f.itl_mean, f.itl_p50, f.itl_p99)))


def _ttft(f: TtftFigures) -> str:
    return f"{milliseconds(f.ttft_median)} ({milliseconds(f.ttft_min)}-{milliseconds(f.ttft_max)})"


def _systems(model: str, dtype: str, folder: Path, plan: MeasurementPlan) -> list[System]:
    cores = num_cores()
    largest = max(plan.streams) * (plan.stream_prompt_tokens + plan.stream_output_tokens)
    # Decode keeps a reserve for each running request, so the pool has room for all of them at once.
    pool_tokens = 4 * max(largest, *plan.ttft)
    return [
        ServedSystem("colocated", model, dtype, 0, 1, cores, pool_tokens),
        ServedSystem("disaggregated", model, dtype, 1, 0, max(1, cores // 2), pool_tokens),
        TransformersSystem("transformers", folder, dtype, cores),
    ]
