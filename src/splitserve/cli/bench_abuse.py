"""`splitserve bench abuse`."""

from __future__ import annotations

from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, typed_again
from splitserve.core.config import DTYPES


def bench_abuse(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "bfloat16",
    attack: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this attack, repeatable. Default: all.")
    ] = None,
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds that an attack continues without an answer.")
    ] = 15.0,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure streams of eight clients under hostile requests and connections. Exit code 1: an attack did harm.

    Harm is a gap of 1 s between two tokens, 300 MB more memory, a failed stream or an ended process. Takes minutes.
    """
    from splitserve.tools.bench.abuse import AbuseOptions, run_abuse_bench
    from splitserve.tools.bench.abuse_attacks import ATTACKS
    from splitserve.tools.bench.report import ReportOutput

    options = AbuseOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        attacks=tuple(attack or ATTACKS),
        duration=duration,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_abuse_bench(options))
