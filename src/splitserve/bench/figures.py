"""`splitserve bench main`: the first figures of this machine, in one run.

1. The prompts are made, the same for every system.
2. Colocated, disaggregated and plain transformers, one after the other: start, warm up, measure, stop.
3. The table is printed, and appended to a log where asked.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from splitserve.bench.jobs import FULL, QUICK, Plan
from splitserve.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.bench.publish import publish
from splitserve.bench.report import Report, SystemFigures
from splitserve.bench.stats import StreamRecord, StreamsFigures, TtftFigures
from splitserve.bench.systems import ServedSystem, System, TransformersSystem
from splitserve.config import DTYPES
from splitserve.engine.sources import resolve_model
from splitserve.errors import ConfigError
from splitserve.launch.local import num_cores
from splitserve.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: str
    dtype: str
    # Markdown file that gets a section; None: none does.
    append_to: Path | None
    as_json: bool
    quick: bool


def run_bench(options: BenchOptions) -> int:
    """Returns the exit code. Raises ConfigError, ClusterError, LoadError."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.append_to is not None:
        check_writable(options.append_to)
    console = Console(stderr=True)
    folder = resolve_model(options.model)
    plan = QUICK if options.quick else FULL
    machine = describe_machine()
    systems = _systems(options, folder, plan)
    report = Report(
        model=options.model,
        dtype=options.dtype,
        command=_command(options),
        stream_shape=f"{plan.stream_prompt_tokens} prompt and {plan.stream_output_tokens} output tokens",
        machine=machine,
        systems=measure(systems, plan, Tokenizer.load(folder), console),
    )
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 0


def measure(systems: Sequence[System], plan: Plan, tokenizer: Tokenizer, console: Console) -> list[SystemFigures]:
    """One system after the other. Raises SplitserveError."""

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
    system: System, plan: Plan, results: Sequence[list[StreamRecord]], cores_taken_by_others: float
) -> SystemFigures:
    """`results` are in the order of the plan's jobs."""
    remaining = iter(results)
    streams = [StreamsFigures.of([next(remaining) for _ in range(runs)]) for runs in plan.streams.values()]
    ttft = [TtftFigures.of(length, [next(remaining)[0] for _ in range(runs)]) for length, runs in plan.ttft.items()]
    return SystemFigures(system.name, system.threads, streams, ttft, cores_taken_by_others)


def _systems(options: BenchOptions, folder: Path, plan: Plan) -> list[System]:
    cores = num_cores()
    largest = max(plan.streams) * (plan.stream_prompt_tokens + plan.stream_output_tokens)
    # Decode keeps a reserve for each running request: room for all of them at once.
    pool_tokens = 4 * max(largest, *plan.ttft)
    return [
        ServedSystem("colocated", options.model, options.dtype, 0, 1, cores, pool_tokens),
        ServedSystem("disaggregated", options.model, options.dtype, 1, 0, max(1, cores // 2), pool_tokens),
        TransformersSystem("transformers", folder, options.dtype, cores),
    ]


def _command(options: BenchOptions) -> str:
    words = ["splitserve", "bench", "main", options.model, "--dtype", options.dtype]
    return shlex.join([*words, *(["--quick"] if options.quick else [])])
