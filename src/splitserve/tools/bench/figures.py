"""`splitserve bench main`: throughput and TTFT on this machine, in one run.

1. The prompts are created, the same for every system.
2. Colocated, disaggregated and plain transformers start, warm up, are measured and stop, one after the other.
3. The table is printed, and appended to a log if requested.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import DTYPES
from splitserve.core.cpus import num_cores
from splitserve.core.errors import ConfigError
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.tools.bench.publish import publish
from splitserve.tools.bench.report import MainReport, SystemFigures
from splitserve.tools.bench.stats import StreamRecord, StreamsFigures, TtftFigures
from splitserve.tools.bench.systems import ServedSystem, System, TransformersSystem
from splitserve.tools.bench.workload import FULL, QUICK, MeasurementPlan


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: str
    dtype: str
    # Markdown file to append a section to. None: no file.
    append_to: Path | None
    as_json: bool
    quick: bool


def run_bench(options: BenchOptions) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError, ClusterError, RequestFailedError."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.append_to is not None:
        check_writable(options.append_to)
    console = Console(stderr=True)
    folder = resolve_model(options.model)
    plan = QUICK if options.quick else FULL
    machine = describe_machine()
    systems = _systems(options, folder, plan)
    report = MainReport(
        model=options.model,
        dtype=options.dtype,
        command=_command(options),
        stream_shape=f"{plan.stream_prompt_tokens} prompt and {plan.stream_output_tokens} output tokens",
        machine=machine,
        systems=measure(systems, plan, Tokenizer.load(folder), console),
    )
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 0


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


def _systems(options: BenchOptions, folder: Path, plan: MeasurementPlan) -> list[System]:
    cores = num_cores()
    largest = max(plan.streams) * (plan.stream_prompt_tokens + plan.stream_output_tokens)
    # Decode keeps a reserve for each running request, so the pool has room for all of them at once.
    pool_tokens = 4 * max(largest, *plan.ttft)
    return [
        ServedSystem("colocated", options.model, options.dtype, 0, 1, cores, pool_tokens),
        ServedSystem("disaggregated", options.model, options.dtype, 1, 0, max(1, cores // 2), pool_tokens),
        TransformersSystem("transformers", folder, options.dtype, cores),
    ]


def _command(options: BenchOptions) -> str:
    words = ["splitserve", "bench", "main", options.model, "--dtype", options.dtype]
    return shlex.join([*words, *(["--quick"] if options.quick else [])])
