"""`splitserve bench router`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, typed_again


def bench_router(
    ctx: typer.Context,
    connections: Annotated[int, typer.Option(min=1, help="At once, for requests/s and chunks/s.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="One after another, for the latency, in each round.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each load on all connections, in each round.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="In which all routers take turns; figures are medians.")] = 5,
    peers: Annotated[
        bool, typer.Option(help="Measure mini_lb and sglang-router, too, where they are installed.")
    ] = True,
    peers_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Interpreter that has sglang-router; default: this one.")
    ] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Requests/s, added latency and streamed chunks/s of the router before mock workers, beside other routers.

    Ours runs as `splitserve router --prefill URL PORT --decode URL`, all other options at their defaults.
    """
    from splitserve.bench.router import RouterBenchOptions, run_router_bench

    options = RouterBenchOptions(
        command=typed_again(ctx),
        connections=connections,
        num_requests=requests,
        seconds=seconds,
        rounds=rounds,
        with_peers=peers,
        peers_python=peers_python,
        append_to=append_to,
        as_json=as_json,
    )
    raise typer.Exit(run_router_bench(options))
