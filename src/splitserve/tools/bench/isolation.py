"""`splitserve bench isolation`: what a pair on one host gains and costs, compared with colocated workers.

docs/benchmarks.md describes the systems and scenarios. In each round every scenario runs on each system in turn, with
equal prompts. Figures are medians of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from splitserve.engine.sources import resolve_model
from splitserve.process.console import progress
from splitserve.tools.bench.options import IsolationBenchOptions
from splitserve.tools.bench.report import ABSENT, Report, ReportTable, Target, text_of
from splitserve.tools.bench.scenarios import IsolationPlan, PromptBatch, Scenario
from splitserve.tools.bench.stats import Figures, StreamRecord, all_tokens_per_second, median, output_tokens_per_second
from splitserve.tools.bench.systems import Server, encoder_of, fill_pools, our_server, target_itl_args
from splitserve.tools.bench.workload import Encode, PromptMaker
from splitserve.worker.checks import check_backend

_NUM_WARM_UPS = 4
FIXED, ADAPTIVE, PAIR = "colocated, fixed chunk", "colocated, adaptive", "pair"
_LEGEND = (
    "Medians of {rounds} round(s); in brackets the ratio to the first column. Idle TTFT: one prompt at a time. Decode: "
    "all prompts of {plan.stream_prompt_tokens} tokens sent at once, output tokens over the time from the first "
    "request to the last token. Interference: {plan.num_streams} streams decode for {plan.window:g} s, then "
    "{plan.num_long_prompts} prompts of {plan.long_prompt_tokens:,} tokens arrive, one each {plan.interval:g} s, and "
    "the window lasts until all are answered. Mixed load: closed loop, prompt and output tokens over the time. "
    "ITL: gaps between frames with tokens at the client."
)


@dataclass(frozen=True, slots=True)
class IsolationSizes:
    rounds: int
    interference: IsolationPlan
    # Prompt tokens, and prompts of each length per round.
    idle_tokens: tuple[int, ...] = (1024, 2048)
    idle_prompts: int = 3
    # Streams at once; prompt tokens as in the interference, and output tokens of each.
    decode_streams: tuple[int, ...] = (8, 32)
    decode_tokens: int = 128
    # Closed loop: requests, those at once, and their tokens.
    mixed_requests: int = 32
    mixed_concurrency: int = 8
    mixed_tokens: tuple[int, int] = (512, 64)


def sizes_for(options: IsolationBenchOptions) -> IsolationSizes:
    """Return the sizes. With `quick` a run takes about four minutes on two cores."""
    quick = options.quick
    plan = IsolationPlan(window=4.0 if quick else 8.0)
    sizes = IsolationSizes(rounds=options.rounds or (1 if quick else 3), interference=plan)
    return replace(sizes, idle_prompts=2, decode_tokens=32, mixed_requests=16) if quick else sizes


def scenarios_of(sizes: IsolationSizes) -> list[Scenario]:
    """Return the scenarios. Figures of different ones have different names."""
    tokens, of_decode = sizes.interference.stream_prompt_tokens, output_tokens_per_second
    return [
        *(
            PromptBatch(f"idle, {n:,} tokens", sizes.idle_prompts, n, 1, 1, _named(f"idle_ttft_{n}", _median_ttft), 1)
            for n in sizes.idle_tokens
        ),
        *(
            PromptBatch(f"decode, {n} streams", n, tokens, sizes.decode_tokens, 1, _named(f"decode_{n}", of_decode))
            for n in sizes.decode_streams
        ),
        sizes.interference,
        PromptBatch(
            "mixed load",
            sizes.mixed_requests,
            *sizes.mixed_tokens,
            num_runs=1,
            figures=_named("mixed", all_tokens_per_second),
            concurrency=sizes.mixed_concurrency,
        ),
    ]


def _named(
    key: str, figure: Callable[[list[StreamRecord]], float]
) -> Callable[[Sequence[list[StreamRecord]]], Figures]:
    """Return the function that computes one figure from one run."""
    return lambda runs: {key: figure(runs[0])}


def _median_ttft(run: Sequence[StreamRecord]) -> float:
    return median([record.ttft for record in run])


def bench_isolation(options: IsolationBenchOptions, console: Console) -> Report:
    """Measure the three systems and return the report. Raises ConfigError, ClusterError, RequestFailedError."""
    check_backend(options.transfer_backend, "--transfer-backend")
    sizes, encode = sizes_for(options), encoder_of(resolve_model(options.model))
    systems = _systems(options, sizes)
    rounds = measure_rounds(systems, sizes, encode, options.timeout, console)
    return isolation_report(options, sizes, {system.name: system.threads for system in systems}, rounds)


def _systems(options: IsolationBenchOptions, sizes: IsolationSizes) -> list[Server]:
    pool_tokens = max(scenario.pool_tokens for scenario in scenarios_of(sizes))
    server = partial(our_server, options=options, threads=None, pool_tokens=pool_tokens)
    return [
        server(FIXED, is_pair=False, worker_args=("--target-itl-ms", "0")),
        server(ADAPTIVE, is_pair=False),
        server(
            PAIR,
            is_pair=True,
            backend=options.transfer_backend,
            worker_args=target_itl_args(options.pair_target_itl_ms),
        ),
    ]


# Figures of each system, by its name; one list item per round.
Rounds = Mapping[str, Sequence[Figures]]


def measure_rounds(
    systems: Sequence[Server], sizes: IsolationSizes, encode: Encode, timeout: float, console: Console
) -> Rounds:
    """Run all rounds and return the figures. Raises ClusterError, RequestFailedError."""
    rounds: dict[str, list[Figures]] = {system.name: [] for system in systems}
    with ExitStack() as closing:
        started = {s.name: closing.enter_context(s.running(console)) for s in systems}
        endpoints = {name: running.endpoint for name, running in started.items()}
        show = closing.enter_context(progress(console, "filling the KV pools"))
        # Equal prompts for all systems, which differ from those of the warm-up.
        makers = {name: PromptMaker(encode) for name in endpoints}
        for running in started.values():
            warm_up = PromptMaker(encode, seed=1)
            fill_pools(running, warm_up.make, timeout)
            # Answers are generated beside later prompts, so that a worker has measured such steps.
            made = [warm_up.make(max(sizes.idle_tokens)) for _ in range(_NUM_WARM_UPS)]
            running.endpoint.ask(made, sizes.decode_tokens, timeout=timeout)
        for number in range(sizes.rounds):
            figures: dict[str, Figures] = {name: {} for name in endpoints}
            for scenario in scenarios_of(sizes):
                for name, endpoint in endpoints.items():
                    show(f"round {number + 1} of {sizes.rounds}: {scenario.name}, {name}")
                    run: Any = scenario.run(endpoint, makers[name], timeout)
                    figures[name] |= scenario.figures([run])
            for name in endpoints:
                rounds[name].append(figures[name])
    return rounds


def targets_of(sizes: IsolationSizes, medians: Mapping[str, Figures]) -> list[Target]:
    fixed, adaptive, pair = (medians[name] for name in (FIXED, ADAPTIVE, PAIR))

    def target(text: str, system: Figures, figure: str, limit: float, *, is_at_most: bool = True) -> Target:
        """Return a target for a figure over that of the fixed chunks."""
        return Target(text, system[figure] / fixed[figure], limit, is_at_most)

    return [
        *(
            target(f"pair: idle TTFT of {n:,} tokens / colocated", pair, f"idle_ttft_{n}", 1.1)
            for n in sizes.idle_tokens
        ),
        Target(
            "pair: ITL p99 with prompts / without", pair["loaded_itl_p99"] / pair["quiet_itl_p99"], 2.0, is_at_most=True
        ),
        *(
            target(f"pair: decode at {n} streams / colocated", pair, f"decode_{n}", 0.95, is_at_most=False)
            for n in sizes.decode_streams
        ),
        target("pair: mixed load / colocated", pair, "mixed", 0.95, is_at_most=False),
        target("adaptive: ITL p99 with prompts / fixed chunk", adaptive, "loaded_itl_p99", 0.25),
        target("adaptive: TTFT p50 of prompts / fixed chunk", adaptive, "ttft_p50", 1.3),
    ]


def isolation_report(
    options: IsolationBenchOptions, sizes: IsolationSizes, threads: Mapping[str, str], rounds: Rounds
) -> Report:
    """Return the report. JSON has times in seconds and throughput in tokens/s."""
    medians = {name: {key: median([run[key] for run in runs]) for key in runs[0]} for name, runs in rounds.items()}
    targets = targets_of(sizes, medians)
    systems = [
        {"system": name, "threads": threads[name], "figures": medians[name], "rounds": list(runs)}
        for name, runs in rounds.items()
    ]
    outcomes = [target.to_json() for target in targets]
    verdicts = [[target.name, *target.texts()] for target in targets]
    return Report(
        title=f"One host, split or not: {options.model} in {options.dtype}",
        setting=f"Threads: {'; '.join(f'{name} {count}' for name, count in threads.items())}",
        legend=_LEGEND.format(rounds=sizes.rounds, plan=sizes.interference),
        figures={"model": options.model, "dtype": options.dtype, "systems": systems, "targets": outcomes},
        tables=[_figures_table(sizes, medians), ReportTable(["target", "measured", "limit", ABSENT], verdicts)],
    )


def _figures_table(sizes: IsolationSizes, medians: Mapping[str, Figures]) -> ReportTable:
    rows = [
        *((f"idle TTFT of {n:,} tokens, ms", f"idle_ttft_{n}", "ms") for n in sizes.idle_tokens),
        *((f"decode at {n} streams, tok/s", f"decode_{n}", ",.1f") for n in sizes.decode_streams),
        ("ITL p50 without prompts, ms", "quiet_itl_p50", "ms"),
        ("ITL p99 without prompts, ms", "quiet_itl_p99", "ms"),
        ("ITL p50 with prompts, ms", "loaded_itl_p50", "ms"),
        ("ITL p99 with prompts, ms", "loaded_itl_p99", "ms"),
        ("TTFT p50 of the prompts, ms", "ttft_p50", "ms"),
        ("mixed load, tok/s", "mixed", ",.0f"),
    ]

    def cell(name: str, key: str, form: str) -> str:
        value, reference = medians[name][key], medians[FIXED][key]
        ratio = f" ({value / reference:.2f})" if name != FIXED and reference else ""
        return text_of(f"{{{key}:{form}}}", medians[name]) + ratio

    return ReportTable(["", *medians], [[row, *(cell(name, key, form) for name in medians)] for row, key, form in rows])
