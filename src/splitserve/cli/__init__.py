"""The command line. Each command reads its options, makes a config of them and hands over; heavy imports wait.

A new command is a function with `@app.command()`. Errors of Splitserve's own come out as one line: exit code 2 where
the options are wrong, which supervisors do not try again, 1 where something failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from splitserve import __version__
from splitserve.cli.bench import bench_app
from splitserve.cli.certs import certs_app
from splitserve.cli.chaos import chaos
from splitserve.cli.cluster import cluster_app
from splitserve.cli.options import (
    ApiKeysOption,
    BackendOption,
    DeviceOption,
    DpSizeOption,
    DtypeOption,
    HandOverOption,
    HostOption,
    JsonOption,
    KernelsOption,
    LogLevelOption,
    ModelArgument,
    OperatorKeysOption,
    ParentOption,
    PpSizeOption,
    QuantizationOption,
    ReadyFileOption,
    ThreadsOption,
    TokenFileOption,
    TpSizeOption,
)
from splitserve.cli.serve import serve
from splitserve.config import DTYPES
from splitserve.core.process_end import unwinding
from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch.checks import check_backend, check_dtype, check_worker_options
from splitserve.launch.shape import WorkerShape
from splitserve.router.args import LBArgs, PrefillConfig, parse_url
from splitserve.router.policies import POLICIES

app = typer.Typer(
    name="splitserve",
    help="LLM serving with prefill and decode disaggregated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Tables would cut the names of options where the terminal is narrow, or none.
    rich_markup_mode=None,
)
app.add_typer(bench_app)
app.add_typer(cluster_app)
app.add_typer(certs_app)


@app.command()
def up(
    model: ModelArgument = "smollm2",
    worker_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Options of `splitserve serve` for every worker, after MODEL --."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the router; 0: any free one.")] = 8000,
    host: HostOption = "127.0.0.1",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    null: Annotated[
        int, typer.Option(min=0, help="Colocated workers: with --prefill 0 --decode 0 instead of pairs.")
    ] = 0,
    prefill_tp_size: TpSizeOption = 1,
    prefill_pp_size: PpSizeOption = 1,
    prefill_dp_size: DpSizeOption = 1,
    decode_tp_size: TpSizeOption = 1,
    decode_pp_size: PpSizeOption = 1,
    decode_dp_size: DpSizeOption = 1,
    transfer_backend: BackendOption = "tcp",
    hand_over: HandOverOption = False,
    threads: ThreadsOption = None,
    kernels: KernelsOption = "auto",
    quantization: QuantizationOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients ask for; default: MODEL.")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="Tokens in each worker's KV pool.")] = None,
    cluster_token_file: TokenFileOption = None,
    log_level: LogLevelOption = "info",
) -> None:
    """Serve a model on this machine: a router, prefill and decode workers. Ctrl-C drains."""
    from splitserve.cluster.deployment import LocalDeployment
    from splitserve.cluster.up import run_up
    from splitserve.launch.cluster_token import read_token_file

    check_dtype(dtype)
    check_backend(transfer_backend, "--transfer-backend")
    worker_args = ["--served-model-name", served_model_name or model, "--kernels", kernels]
    if device != "auto":
        worker_args += ["--device", device]
    if quantization is not None:
        worker_args += ["--quantization", quantization]
    if worker_options and not worker_options[0].startswith("-"):
        raise ConfigError(f"{worker_options[0]!r}: one model; options of the workers follow after --")
    check_worker_options(worker_options or [], has_pairs=prefill > 0)
    worker_args += worker_options or []
    if max_total_tokens is not None:
        worker_args += ["--max-total-tokens", str(max_total_tokens)]
    if cluster_token_file is not None:
        read_token_file(cluster_token_file)
    deployment = LocalDeployment(
        model=model,
        prefill=prefill,
        decode=decode,
        null=null,
        prefill_shape=WorkerShape.of("prefill", prefill_tp_size, prefill_pp_size, prefill_dp_size),
        decode_shape=WorkerShape.of("decode", decode_tp_size, decode_pp_size, decode_dp_size),
        dtype=dtype,
        backend=transfer_backend,
        host=host,
        port=port,
        threads=threads,
        worker_args=worker_args,
        cluster_token_file=cluster_token_file,
        hand_over=hand_over,
        log_level=log_level,
    )
    raise typer.Exit(run_up(deployment))


app.command()(serve)


@app.command()
def router(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL [BOOTSTRAP_PORT]", help="A prefill worker; repeatable.")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(metavar="URL", help="A decode worker; repeatable.")] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="URL", help="A colocated worker; repeatable.")] = None,
    workers_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Workers, one JSON object a line; read again when it changes."),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"Who gets a request: {', '.join(POLICIES)}.")] = "round_robin",
    prefill_policy: Annotated[str | None, typer.Option(help="The same for prefill workers alone.")] = None,
    decode_policy: Annotated[str | None, typer.Option(help="The same for decode workers alone.")] = None,
    balance_abs_threshold: Annotated[
        int, typer.Option(help="cache_aware: a worker is passed over while it has so many requests more than another,")
    ] = 8,
    balance_rel_threshold: Annotated[float, typer.Option(help="and so many times as many.")] = 1.5,
    model: Annotated[
        str | None, typer.Option(help="cache_aware: whose tokenizer reads prompts; default: the workers' own.")
    ] = None,
    disaggregate_above: Annotated[
        int | None,
        typer.Option(metavar="N", help="Prompts with at most N tokens not cached on decode are computed there."),
    ] = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Workers that join get requests when a probe has come through.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take in all.")] = 1800.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to reach a worker.")] = 5.0,
    idle_timeout: Annotated[float, typer.Option(help="Seconds a worker may be silent while it answers.")] = 600.0,
    health_interval: Annotated[float, typer.Option(help="Seconds between two health checks.")] = 2.0,
    hang_timeout: Annotated[float, typer.Option(help="Seconds without a sign of life until a worker hangs.")] = 30.0,
    max_retries: Annotated[int, typer.Option(help="Other workers a request may go to without a new token.")] = 3,
    drain_timeout: Annotated[float, typer.Option(help="Seconds running requests get at the end.")] = 30.0,
    log_level: LogLevelOption = "info",
    max_running_requests: Annotated[
        int | None, typer.Option(help="Requests at the workers at once; default: as many as come.")
    ] = None,
    max_queued_requests: Annotated[int, typer.Option(help="Requests waiting for a place, beyond that: 503.")] = 1024,
    rate_limit: Annotated[
        float | None, typer.Option(metavar="N", help="Requests a second of each key, beyond that: 429.")
    ] = None,
    rate_limit_burst: Annotated[
        int | None, typer.Option(metavar="N", help="Requests of each key at once; default: those of a second.")
    ] = None,
    disable_access_log: Annotated[
        bool, typer.Option("--disable-access-log", help="Write no line for each request.")
    ] = False,
    api_key_file: ApiKeysOption = None,
    operator_key_file: OperatorKeysOption = None,
    worker_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its first key is shown to the workers, where they have --api-key-file."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web pages from there may ask, or *; repeatable.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM certificate: serve https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate.")] = None,
    worker_ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file with the authority of the certificates of workers at https URLs."),
    ] = None,
    worker_ssl_certfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM certificate for workers that require one (their --ssl-ca-certs)."),
    ] = None,
    worker_ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM key of --worker-ssl-certfile.")
    ] = None,
    ready_file: ReadyFileOption = None,
    exit_with_parent: ParentOption = False,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the router. Workers are named here, or register themselves (splitserve serve --router URL)."""
    from splitserve.launch.router import run_router

    args = LBArgs(
        host=host,
        port=port,
        policy=policy,
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        balance_abs_threshold=balance_abs_threshold,
        balance_rel_threshold=balance_rel_threshold,
        model=model,
        disaggregate_above=disaggregate_above,
        prefill=tuple(PrefillConfig.parse(text) for text in prefill or ()),
        decode=tuple(parse_url(url) for url in decode or ()),
        workers=tuple(parse_url(url) for url in worker or ()),
        workers_file=workers_file,
        probe=probe,
        timeout=timeout,
        connect_timeout=connect_timeout,
        idle_timeout=idle_timeout,
        health_interval=health_interval,
        hang_timeout=hang_timeout,
        max_retries=max_retries,
        drain_timeout=drain_timeout,
        log_level=log_level,
        max_running_requests=max_running_requests,
        max_queued_requests=max_queued_requests,
        rate_limit=rate_limit,
        rate_limit_burst=rate_limit_burst,
        access_log=not disable_access_log,
        api_key_file=api_key_file,
        operator_key_file=operator_key_file,
        worker_key_file=worker_key_file,
        cors_origins=tuple(cors_origin or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        worker_ssl_ca_certs=worker_ssl_ca_certs,
        worker_ssl_certfile=worker_ssl_certfile,
        worker_ssl_keyfile=worker_ssl_keyfile,
    )
    raise typer.Exit(run_router(args, ready_file=ready_file, fd=fd, exit_with_parent=exit_with_parent))


@app.command()
def demo(
    model: ModelArgument = "smollm2",
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France? Tell me about it.",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the answer at most.")] = 64,
    dtype: DtypeOption = "float32",
) -> None:
    """One question, answered by a prefill and a decode process, measured, and compared with a colocated worker."""
    from splitserve.launch.demo import run_demo

    check_dtype(dtype)
    raise typer.Exit(run_demo(model, prompt, max_tokens=max_tokens, dtype=dtype))


@app.command()
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetch a model, so that later starts are fast. Prints its folder."""
    from splitserve.engine.sources import resolve_model

    typer.echo(resolve_model(model))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Of a router or worker.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first one served there.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
) -> None:
    """Talk to a served model in the terminal."""
    from splitserve.launch.chat import run_chat

    raise typer.Exit(
        run_chat(parse_url(url), model=model, system=system, max_tokens=max_tokens, temperature=temperature)
    )


@app.command()
def verify(
    model: ModelArgument = "smollm2",
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"auto, {', '.join(DTYPES)}; default: float32, in which equal means equal token for token, and "
            "bfloat16 with --quantization."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Each line {"text": ...}, {"input_ids": [...]} or a string.'),
    ] = None,
    as_json: JsonOption = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 64,
    transfer_backend: BackendOption = "tcp",
    hand_over: HandOverOption = False,
    prefill_tp_size: TpSizeOption = 1,
    prefill_pp_size: PpSizeOption = 1,
    prefill_dp_size: DpSizeOption = 1,
    decode_tp_size: TpSizeOption = 1,
    decode_pp_size: PpSizeOption = 1,
    decode_dp_size: DpSizeOption = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each rank's model; default: the cores, divided.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of the pair's weights only, to see what it costs; exit code 0 whatever that is.")
    ] = None,
) -> None:
    """Compare colocated and disaggregated output, token by token. Exit code 0: equal."""
    from splitserve.launch.verify import VerifyOptions, run_verify

    if dtype is None:
        dtype = "float32" if quantization is None else "bfloat16"
    check_dtype(dtype)
    options = VerifyOptions(
        model=model,
        dtype=dtype,
        prompts_file=prompts,
        max_tokens=max_tokens,
        transfer_backend=transfer_backend,
        hand_over=hand_over,
        threads=threads,
        quantization=quantization,
        prefill_shape=WorkerShape.of("prefill", prefill_tp_size, prefill_pp_size, prefill_dp_size),
        decode_shape=WorkerShape.of("decode", decode_tp_size, decode_pp_size, decode_dp_size),
    )
    raise typer.Exit(run_verify(options, as_json=as_json))


app.command()(chaos)


@app.command()
def doctor() -> None:
    """Show what this machine offers: versions, cores, memory, devices, transports, ports."""
    from splitserve.launch.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"splitserve {__version__}")
        raise typer.Exit


def join_prefill_ports(argv: Sequence[str]) -> list[str]:
    """`--prefill URL PORT` as one value, `--prefill "URL PORT"`: an option cannot have an optional second value."""
    joined: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--prefill" and words and "router" in joined:
            joined.append(word)
            word = words.pop(0)
        elif not (word.startswith("--prefill=") and "router" in joined):
            joined.append(word)
            continue
        if words and (words[0].isdecimal() or words[0].lower() == "none"):
            word = f"{word} {words.pop(0)}"
        joined.append(word)
    return joined


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = join_prefill_ports(sys.argv[1:] if argv is None else argv)
    try:
        # Benchmarks start processes of their own and of others.
        with unwinding() if words[:1] == ["bench"] else nullcontext():
            app(args=words, prog_name="splitserve")
    except SplitserveError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(error.exit_code)
