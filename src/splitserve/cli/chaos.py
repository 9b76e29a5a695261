"""The command `splitserve chaos`."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, BackendOption, JsonOption, ModelArgument, typed_again
from splitserve.worker.checks import check_backend


def chaos(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds of faults.")] = 120.0,
    streams: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 30,
    prefill: Annotated[int, typer.Option(min=2, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=2, help="Decode workers.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each output.")] = 24,
    transfer_backend: BackendOption = "tcp",
    hang_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds until the router considers a worker hung.")
    ] = 6.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the faults. Default: a random one.")] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop, restart and switch workers of a local cluster under load. Exit code 0: no client lost anything.

    Every answer is compared with that of an undisturbed run. At the end no worker may hold any resource.
    """
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.chaos.run import ChaosOptions, run_chaos

    check_backend(transfer_backend, "--transfer-backend")
    options = ChaosOptions(
        command=typed_again(ctx),
        model=model,
        seconds=seconds,
        num_streams=streams,
        prefill=prefill,
        decode=decode,
        num_tokens=max_tokens,
        backend=transfer_backend,
        hang_timeout=hang_timeout,
        seed=secrets.randbelow(1 << 16) if seed is None else seed,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_chaos(options))
