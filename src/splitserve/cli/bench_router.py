"""`splitserve bench router`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, typed_again


def bench_router(
    ctx: typer.Context,
    connections: Annotated[int, typer.Option(min=1, help="Connections at once, for requests/s and chunks/s.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests one after another per round, for the latency.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each load on all connections.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds. In each, all routers take turns.")] = 5,
    peers: Annotated[bool, typer.Option(help="Measure mini_lb and sglang-router, too, if they are installed.")] = True,
    peers_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Python interpreter with sglang-router. Default: this one.")
    ] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare requests/s, added latency and streamed chunks/s of our router and of others before mock workers.

    Our router runs as `splitserve router --prefill URL PORT --decode URL` with default options. Figures are medians.
    """
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.router import RouterBenchOptions, run_router_bench

    options = RouterBenchOptions(
        command=typed_again(ctx),
        connections=connections,
        num_requests=requests,
        seconds=seconds,
        rounds=rounds,
        with_peers=peers,
        peers_python=peers_python,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_router_bench(options))
