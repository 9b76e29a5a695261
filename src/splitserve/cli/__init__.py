"""The command line. Each command reads its options, makes a config of them and hands over; heavy imports wait.

A new command is a function with `@app.command()`. Errors of Splitserve's own come out as one line: exit code 2 where
the options are wrong, 1 where something failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from splitserve import __version__
from splitserve.cli.bench import bench_app
from splitserve.cli.options import (
    CpuAffinityOption,
    DtypeOption,
    HandOverOption,
    HostOption,
    JsonOption,
    KernelsOption,
    LogLevelOption,
    ModelArgument,
    ParentOption,
    QuantizationOption,
    ReadyFileOption,
    ThreadsOption,
    TokenFileOption,
)
from splitserve.config import (
    TRANSFER_DTYPES,
    CacheConfig,
    DisaggregationConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    WorkerConfig,
)
from splitserve.core.request import DisaggregationMode
from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch.checks import check_backend, check_dtype, check_worker, named_values
from splitserve.router.args import LBArgs, PrefillConfig, parse_url

app = typer.Typer(
    name="splitserve",
    help="LLM serving with prefill and decode disaggregated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app)


@app.command()
def up(
    model: ModelArgument = "smollm2",
    port: Annotated[int, typer.Option(help="Port of the router; 0: any free one.")] = 8000,
    host: HostOption = "127.0.0.1",
    dtype: DtypeOption = "auto",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    null: Annotated[
        int, typer.Option(min=0, help="Colocated workers: with --prefill 0 --decode 0 instead of pairs.")
    ] = 0,
    transfer_backend: Annotated[str, typer.Option(help="How the KV cache travels.")] = "tcp",
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
    from splitserve.launch.cluster_token import read_token_file
    from splitserve.launch.local import LocalCluster
    from splitserve.launch.up import run_up

    check_dtype(dtype)
    check_backend(transfer_backend, "--transfer-backend")
    worker_args = ["--served-model-name", served_model_name or model, "--kernels", kernels]
    if quantization is not None:
        worker_args += ["--quantization", quantization]
    if max_total_tokens is not None:
        worker_args += ["--max-total-tokens", str(max_total_tokens)]
    if cluster_token_file is not None:
        read_token_file(cluster_token_file)
    cluster = LocalCluster(
        model,
        prefill=prefill,
        decode=decode,
        null=null,
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
    raise typer.Exit(run_up(cluster, model))


@app.command()
def serve(
    model: ModelArgument = "smollm2",
    disaggregation_mode: Annotated[DisaggregationMode, typer.Option(help="null: both phases here.")] = (
        DisaggregationMode.NULL
    ),
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 30000,
    router: Annotated[str | None, typer.Option(metavar="URL", help="Router to register with.")] = None,
    disaggregation_host: Annotated[
        str | None, typer.Option(help="Address by which the other workers reach this one; default: --host.")
    ] = None,
    disaggregation_bootstrap_port: Annotated[
        int,
        typer.Option(
            help="Prefill: port of its bootstrap server, 0: any free one. Decode: used where a request names none."
        ),
    ] = 8998,
    disaggregation_transfer_backend: Annotated[
        str,
        typer.Option("--disaggregation-transfer-backend", "--transfer-backend", help="How the KV cache travels."),
    ] = "tcp",
    transfer_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Backend's own setting, repeatable: mooncake takes protocol, device."),
    ] = None,
    transfer_checksum: Annotated[
        bool, typer.Option(help="Compare every prompt's KV cache end to end; enough on one side.")
    ] = False,
    transfer_dtype: Annotated[
        str, typer.Option(help=f"Decode: dtype of the KV cache on its way here: auto, {', '.join(TRANSFER_DTYPES)}.")
    ] = "auto",
    cluster_token_file: TokenFileOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients ask for; default: MODEL.")] = None,
    dtype: DtypeOption = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    context_length: Annotated[int | None, typer.Option(help="Tokens a request may have; default: the model's.")] = None,
    threads: ThreadsOption = None,
    cpu_affinity: CpuAffinityOption = None,
    kernels: KernelsOption = "auto",
    quantization: QuantizationOption = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a page of the KV pool.")] = 16,
    max_total_tokens: Annotated[int | None, typer.Option(help="Tokens in the KV pool.")] = None,
    shared_pool: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compute in one pool with other workers of this host (backend shm)."),
    ] = None,
    mem_fraction_static: Annotated[float, typer.Option(help="Of free memory, for the KV pool.")] = 0.15,
    disable_radix_cache: Annotated[bool, typer.Option("--disable-radix-cache", help="Keep no prefixes.")] = False,
    chunked_prefill_size: Annotated[int, typer.Option(help="Tokens computed in a step.")] = 2048,
    max_running_requests: Annotated[int, typer.Option(help="Requests computed together.")] = 256,
    max_queued_requests: Annotated[int, typer.Option(help="Requests waiting, beyond that: 503.")] = 4096,
    bootstrap_timeout: Annotated[float, typer.Option(help="Seconds a request waits for its other side.")] = 300.0,
    transfer_timeout: Annotated[float, typer.Option(help="Seconds a KV hand-over may take.")] = 300.0,
    grammar_timeout: Annotated[float, typer.Option(help="Seconds a request waits for its compiled grammar.")] = 60.0,
    load_timeout: Annotated[float, typer.Option(help="Seconds for loading the model.")] = 900.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds running requests get at the end.")] = 30.0,
    log_level: LogLevelOption = "info",
    ready_file: ReadyFileOption = None,
    exit_with_parent: ParentOption = False,
) -> None:
    """Run one worker: colocated, prefill or decode."""
    from splitserve.launch.cluster_token import read_token_file

    defaults = DisaggregationConfig()
    is_wildcard = host in ("0.0.0.0", "::", "")
    if is_wildcard and disaggregation_host is None and (router or disaggregation_mode is not DisaggregationMode.NULL):
        raise ConfigError(f"--host {host!r} is no address that others can reach: give that as --disaggregation-host")
    peer_host = defaults.host if is_wildcard else host
    token = defaults.cluster_token
    if cluster_token_file is not None and disaggregation_mode is not DisaggregationMode.NULL:
        token = read_token_file(cluster_token_file)
    config = WorkerConfig(
        model=ModelConfig(
            model=model,
            dtype=dtype,
            device=device,
            context_length=context_length,
            threads=threads,
            cpu_affinity=cpu_affinity,
            kernels=kernels,
            quantization=quantization,
        ),
        cache=CacheConfig(
            page_size=page_size,
            max_total_tokens=max_total_tokens,
            mem_fraction=mem_fraction_static,
            enable_prefix_cache=not disable_radix_cache,
            shared_pool=None if shared_pool is None else str(shared_pool),
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=chunked_prefill_size,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            grammar_timeout=grammar_timeout,
        ),
        disaggregation=DisaggregationConfig(
            mode=disaggregation_mode,
            transfer_backend=disaggregation_transfer_backend,
            transfer_dtype=transfer_dtype,
            transfer_checksum=transfer_checksum,
            transfer_options=named_values(transfer_option or (), "--transfer-option"),
            host=disaggregation_host or peer_host,
            cluster_token=token,
            bootstrap_port=disaggregation_bootstrap_port,
            bootstrap_timeout=bootstrap_timeout,
            transfer_timeout=transfer_timeout,
        ),
        server=ServerConfig(
            host=host,
            port=port,
            served_model_name=served_model_name,
            router_url=None if router is None else parse_url(router),
            log_level=log_level,
        ),
    )
    check_worker(config)
    from splitserve.launch.worker import ProcessOptions, run_worker

    options = ProcessOptions(
        ready_file=ready_file,
        exit_with_parent=exit_with_parent,
        load_timeout=load_timeout,
        drain_timeout=drain_timeout,
    )
    raise typer.Exit(run_worker(config, options=options))


@app.command()
def router(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL [BOOTSTRAP_PORT]", help="A prefill worker; repeatable.")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(metavar="URL", help="A decode worker; repeatable.")] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="URL", help="A colocated worker; repeatable.")] = None,
    policy: Annotated[str, typer.Option(help="round_robin or random.")] = "round_robin",
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take in all.")] = 1800.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to reach a worker.")] = 5.0,
    idle_timeout: Annotated[float, typer.Option(help="Seconds a worker may be silent while it answers.")] = 600.0,
    health_interval: Annotated[float, typer.Option(help="Seconds between two health checks.")] = 5.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds running requests get at the end.")] = 30.0,
    log_level: LogLevelOption = "info",
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
        prefill=tuple(PrefillConfig.parse(text) for text in prefill or ()),
        decode=tuple(parse_url(url) for url in decode or ()),
        workers=tuple(parse_url(url) for url in worker or ()),
        timeout=timeout,
        connect_timeout=connect_timeout,
        idle_timeout=idle_timeout,
        health_interval=health_interval,
        drain_timeout=drain_timeout,
        log_level=log_level,
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
    dtype: DtypeOption = "float32",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Each line {"text": ...}, {"input_ids": [...]} or a string.'),
    ] = None,
    as_json: JsonOption = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 64,
    transfer_backend: Annotated[str, typer.Option(help="How the KV cache travels.")] = "tcp",
    hand_over: HandOverOption = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each worker's model.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of the pair's weights only, to see what it costs; exit code 0 whatever that is.")
    ] = None,
) -> None:
    """Compare colocated and disaggregated output, token by token. Exit code 0: equal."""
    from splitserve.launch.verify import VerifyOptions, run_verify

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
    )
    raise typer.Exit(run_verify(options, as_json=as_json))


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
        app(args=words, prog_name="splitserve")
    except SplitserveError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
