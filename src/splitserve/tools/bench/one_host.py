"""`splitserve bench isolation`: what a pair on one host gains and costs, compared with colocated workers.

The systems run side by side, and one of them receives requests at a time:

    fixed      One colocated worker, chunks of --chunked-prefill-size: the reference of all ratios.
    adaptive   One colocated worker, chunks by a target for the step time (docs/scheduling.md). This is the default.
    pair       One prefill and one decode worker, each with half of the cores as its own (--threads).

In each round every scenario runs on each system in turn, with equal prompts. Figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.process.console import progress
from splitserve.tools.bench.isolation import IsolationPlan
from splitserve.tools.bench.load import Endpoint, run_load
from splitserve.tools.bench.options import IsolationBenchOptions
from splitserve.tools.bench.report import ABSENT, OthersWatch, Report, ReportTable, milliseconds
from splitserve.tools.bench.stats import Figures, median, output_tokens_per_second
from splitserve.tools.bench.systems import Server, encoder_of, our_server
from splitserve.tools.bench.workload import Encode, LoadRequest, PromptMaker
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

    @property
    def pool_tokens(self) -> int:
        # Decode keeps a reserve for each running request.
        of_decode = 4 * max(self.decode_streams) * (self.interference.stream_prompt_tokens + self.decode_tokens)
        return max(self.interference.pool_tokens, of_decode, 2 * self.mixed_concurrency * sum(self.mixed_tokens))


# Measures a scenario on a system. (endpoint, prompts, timeout) Raises RequestFailedError.
Measure = Callable[[Endpoint, PromptMaker, float], Figures]


def sizes_for(options: IsolationBenchOptions) -> IsolationSizes:
    """Return the sizes. With `quick` a run takes about two minutes on two cores."""
    if not options.quick:
        plan = IsolationPlan(window=8.0, stream_output_tokens=6000, awaits_all=True)
        return IsolationSizes(rounds=options.rounds or 3, interference=plan)
    return IsolationSizes(
        rounds=options.rounds or 1,
        interference=IsolationPlan(window=4.0, awaits_all=True),
        idle_prompts=2,
        decode_tokens=32,
        mixed_requests=16,
    )


def scenarios_of(sizes: IsolationSizes) -> dict[str, Measure]:
    """Return the scenarios by name. Figures of different scenarios have different names."""
    plan = sizes.interference

    def idle(num_tokens: int, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> Figures:
        ttfts = [endpoint.ask([prompts.make(num_tokens)], 1, timeout)[0].ttft for _ in range(sizes.idle_prompts)]
        return {f"idle_ttft_{num_tokens}": median(ttfts)}

    def decode(count: int, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> Figures:
        made = [prompts.make(plan.stream_prompt_tokens) for _ in range(count)]
        return {f"decode_{count}": output_tokens_per_second(endpoint.ask(made, sizes.decode_tokens, timeout))}

    def mixed(endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> Figures:
        num_input, num_output = sizes.mixed_tokens
        requests = [LoadRequest(prompts.make(num_input), num_output) for _ in range(sizes.mixed_requests)]
        load = asyncio.run(run_load(endpoint, requests, concurrency=sizes.mixed_concurrency, timeout=timeout))
        return {"mixed": len(load.complete()) * (num_input + num_output) / load.elapsed}

    return {
        **{f"idle, {n:,} tokens": lambda *how, n=n: idle(n, *how) for n in sizes.idle_tokens},
        **{f"decode, {n} streams": lambda *how, n=n: decode(n, *how) for n in sizes.decode_streams},
        "interference": plan.run,
        "mixed load": mixed,
    }


def bench_isolation(options: IsolationBenchOptions, console: Console) -> Report:
    """Measure the three systems and return the report. Raises ConfigError, ClusterError, RequestFailedError."""
    check_backend(options.transfer_backend, "--transfer-backend")
    sizes, encode = sizes_for(options), encoder_of(resolve_model(options.model))
    others = OthersWatch()
    systems = _systems(options, sizes)
    rounds = measure_rounds(systems, sizes, encode, options.timeout, console)
    threads = {system.name: system.threads for system in systems}
    return isolation_report(options, sizes, threads, rounds, others.cores_taken())


def _systems(options: IsolationBenchOptions, sizes: IsolationSizes) -> list[Server]:
    cores = num_cores()

    def system(name: str, threads: int, *worker_args: str, is_pair: bool = False) -> Server:
        return our_server(
            name,
            options.model,
            options.dtype,
            threads,
            sizes.pool_tokens,
            is_pair=is_pair,
            backend=options.transfer_backend,
            worker_args=worker_args,
        )

    return [
        system(FIXED, cores, "--target-itl-ms", "0"),
        system(ADAPTIVE, cores),
        system(PAIR, max(1, cores // 2), is_pair=True),
    ]


# Figures of each system, by its name; one list item per round.
Rounds = Mapping[str, Sequence[Figures]]


def measure_rounds(
    systems: Sequence[Server], sizes: IsolationSizes, encode: Encode, timeout: float, console: Console
) -> Rounds:
    """Run all rounds and return the figures. Raises ClusterError, RequestFailedError."""
    rounds: dict[str, list[Figures]] = {system.name: [] for system in systems}
    with ExitStack() as closing:
        endpoints = {s.name: closing.enter_context(s.running(console)).endpoint for s in systems}
        show = closing.enter_context(progress(console, "warming up"))
        # Equal prompts for all systems, which differ from those of the warm-up.
        makers = {name: PromptMaker(encode) for name in endpoints}
        for endpoint in endpoints.values():
            warm_up = PromptMaker(encode, seed=1)
            # Answers are generated beside later prompts, so that a worker has measured such steps.
            made = [warm_up.make(max(sizes.idle_tokens)) for _ in range(_NUM_WARM_UPS)]
            endpoint.ask(made, sizes.decode_tokens, timeout)
        for number in range(sizes.rounds):
            figures: dict[str, Figures] = {name: {} for name in endpoints}
            for scenario, measure in scenarios_of(sizes).items():
                for name, endpoint in endpoints.items():
                    show(f"round {number + 1} of {sizes.rounds}: {scenario}, {name}")
                    figures[name] |= measure(endpoint, makers[name], timeout)
            for name in endpoints:
                rounds[name].append(figures[name])
    return rounds


@dataclass(frozen=True, slots=True)
class IsolationTarget:
    name: str
    # Measured value from the medians of all systems.
    value: Callable[[Mapping[str, Figures]], float]
    limit: float
    is_at_most: bool

    def outcome(self, medians: Mapping[str, Figures]) -> dict[str, Any]:
        value = self.value(medians)
        is_met = value <= self.limit if self.is_at_most else value >= self.limit
        return {"target": self.name, "at_most": self.is_at_most, "limit": self.limit, "measured": value, "met": is_met}


def _ratio(system: str, figure: str) -> Callable[[Mapping[str, Figures]], float]:
    """Return the function that divides a figure of `system` by that of the fixed chunk."""
    return lambda medians: medians[system][figure] / medians[FIXED][figure]


def targets_of(sizes: IsolationSizes) -> list[IsolationTarget]:
    return [
        *(
            IsolationTarget(f"pair: idle TTFT of {n:,} tokens / colocated", _ratio(PAIR, f"idle_ttft_{n}"), 1.1, True)
            for n in sizes.idle_tokens
        ),
        IsolationTarget(
            "pair: ITL p99 with prompts / without",
            lambda medians: medians[PAIR]["loaded_itl_p99"] / medians[PAIR]["quiet_itl_p99"],
            2.0,
            True,
        ),
        *(
            IsolationTarget(f"pair: decode at {n} streams / colocated", _ratio(PAIR, f"decode_{n}"), 0.95, False)
            for n in sizes.decode_streams
        ),
        IsolationTarget("pair: mixed load / colocated", _ratio(PAIR, "mixed"), 0.95, False),
        IsolationTarget("adaptive: ITL p99 with prompts / fixed chunk", _ratio(ADAPTIVE, "loaded_itl_p99"), 0.25, True),
        IsolationTarget("adaptive: TTFT p50 of prompts / fixed chunk", _ratio(ADAPTIVE, "ttft_p50"), 1.3, True),
    ]


def isolation_report(
    options: IsolationBenchOptions,
    sizes: IsolationSizes,
    threads: Mapping[str, str],
    rounds: Rounds,
    cores_taken: float,
) -> Report:
    """Return the report. JSON has times in seconds and throughput in tokens/s."""
    medians = {name: {key: median([run[key] for run in runs]) for key in runs[0]} for name, runs in rounds.items()}
    outcomes = [target.outcome(medians) for target in targets_of(sizes)]
    systems = [
        {"system": name, "threads": threads[name], "figures": medians[name], "rounds": list(runs)}
        for name, runs in rounds.items()
    ]
    return Report(
        title=f"One host, split or not: {options.model} in {options.dtype}",
        setting=f"Threads: {'; '.join(f'{name} {count}' for name, count in threads.items())}",
        cores_taken_by_others=cores_taken,
        legend=_LEGEND.format(rounds=sizes.rounds, plan=sizes.interference),
        figures={"model": options.model, "dtype": options.dtype, "systems": systems, "targets": outcomes},
        tables=[_figures_table(sizes, medians), _targets_table(outcomes)],
    )


def _figures_table(sizes: IsolationSizes, medians: Mapping[str, Figures]) -> ReportTable:
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        *((f"idle TTFT of {n:,} tokens, ms", f"idle_ttft_{n}", milliseconds) for n in sizes.idle_tokens),
        *((f"decode at {n} streams, tok/s", f"decode_{n}", "{:,.1f}".format) for n in sizes.decode_streams),
        ("ITL p50 without prompts, ms", "quiet_itl_p50", milliseconds),
        ("ITL p99 without prompts, ms", "quiet_itl_p99", milliseconds),
        ("ITL p50 with prompts, ms", "loaded_itl_p50", milliseconds),
        ("ITL p99 with prompts, ms", "loaded_itl_p99", milliseconds),
        ("TTFT p50 of the prompts, ms", "ttft_p50", milliseconds),
        ("mixed load, tok/s", "mixed", "{:,.0f}".format),
    ]

    def cell(name: str, key: str, show: Callable[[float], str]) -> str:
        value, reference = medians[name][key], medians[FIXED][key]
        ratio = f" ({value / reference:.2f})" if name != FIXED and reference else ""
        return show(value) + ratio

    return ReportTable(["", *medians], [[row, *(cell(name, key, show) for name in medians)] for row, key, show in rows])


def _targets_table(outcomes: Sequence[dict[str, Any]]) -> ReportTable:
    rows = [
        [
            outcome["target"],
            f"{outcome['measured']:.2f}",
            f"{'at most' if outcome['at_most'] else 'at least'} {outcome['limit']:g}",
            "met" if outcome["met"] else "not met",
        ]
        for outcome in outcomes
    ]
    return ReportTable(["target", "measured", "limit", ABSENT], rows)
