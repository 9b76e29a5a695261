"""`splitserve serve`: one worker. The options are the parameters here, and all they do is fill a WorkerConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.options import (
    AlgorithmOption,
    AttentionOption,
    CpuAffinityOption,
    DeviceOption,
    DpAttentionOption,
    DpSizeOption,
    DraftModelOption,
    DtypeOption,
    ExpertParallelOption,
    GraphBatchOption,
    HostMemoryOption,
    InitAddrOption,
    KernelsOption,
    KVEventsOption,
    LogLevelOption,
    MaxMatchOption,
    ModelArgument,
    NnodesOption,
    NodeRankOption,
    NoGraphOption,
    NumDraftTokensOption,
    ParentOption,
    PolicyOption,
    PpLayersOption,
    PpSizeOption,
    PrefixHostMemoryOption,
    PriorityOption,
    QuantizationOption,
    ReadyFileOption,
    RequestTimeoutOption,
    ReservedTokensOption,
    RouterKeyOption,
    ThreadsOption,
    TokenFileOption,
    TpSizeOption,
    WorkerKeysOption,
)
from splitserve.config import (
    TRANSFER_DTYPES,
    CacheConfig,
    DisaggregationConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulePolicy,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.transports import USER_BACKENDS, options_help
from splitserve.errors import ConfigError
from splitserve.launch.checks import check_nodes, check_worker, named_values, num_bytes, stage_sizes
from splitserve.launch.join import WILDCARDS, settle_place


def serve(
    model: ModelArgument = "smollm2",
    disaggregation_mode: Annotated[DisaggregationMode, typer.Option(help="null: both phases here.")] = (
        DisaggregationMode.NULL
    ),
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: 127.0.0.1, with --join that towards the router.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="0: any free one, default with --join; else: 30000.")] = None,
    router: Annotated[
        list[str] | None, typer.Option(metavar="URL[,URL]", help="Router to register with; repeatable.")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The same, and be reached there by the address that leads to it."),
    ] = None,
    router_key_file: RouterKeyOption = None,
    router_certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file with the certificate that a router at an https URL must present."),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificate of this worker: serve https.")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate.")] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM authorities: only clients with a certificate of theirs are served."),
    ] = None,
    api_key_file: WorkerKeysOption = None,
    disaggregation_host: Annotated[
        str | None, typer.Option(help="Address by which the other workers reach this one; default: --host.")
    ] = None,
    disaggregation_bootstrap_port: Annotated[
        int | None,
        typer.Option(
            help="Prefill: port of its bootstrap server, 0: any free one, default with --join; else: 8998. Decode: "
            "used where a request names none."
        ),
    ] = None,
    disaggregation_transfer_backend: Annotated[
        str,
        typer.Option(
            "--disaggregation-transfer-backend",
            "--transfer-backend",
            help=f"How the KV cache travels: {', '.join(USER_BACKENDS)}.",
        ),
    ] = "tcp",
    transfer_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help=f"Backend's own setting, repeatable. {options_help()}."),
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
    device: DeviceOption = "auto",
    attention_backend: AttentionOption = "auto",
    disable_cuda_graph: NoGraphOption = False,
    cuda_graph_max_bs: GraphBatchOption = 256,
    context_length: Annotated[int | None, typer.Option(help="Tokens a request may have; default: the model's.")] = None,
    tp_size: TpSizeOption = 1,
    enable_expert_parallel: ExpertParallelOption = False,
    pp_size: PpSizeOption = 1,
    pp_layers: PpLayersOption = None,
    dp_size: DpSizeOption = 1,
    enable_dp_attention: DpAttentionOption = False,
    nnodes: NnodesOption = 1,
    node_rank: NodeRankOption = 0,
    dist_init_addr: InitAddrOption = None,
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
    mem_fraction_static: Annotated[
        float | None, typer.Option(help="Of the device's free memory, for the KV pool; default: 0.15, GPU: 0.85.")
    ] = None,
    swa_full_tokens_ratio: Annotated[
        float | None,
        typer.Option(
            help="Where some layers have sliding windows: tokens in their pool for each one in the others', at most; "
            "default: window / 2048, 1: one pool for all."
        ),
    ] = None,
    disable_radix_cache: Annotated[bool, typer.Option("--disable-radix-cache", help="Keep no prefixes.")] = False,
    decode_prefix_cache: Annotated[
        bool, typer.Option(help="Decode: keep prefixes, so that prefill sends only what is new.")
    ] = True,
    prefix_host_memory: PrefixHostMemoryOption = "0",
    chunked_prefill_size: Annotated[int, typer.Option(help="Tokens computed in a step.")] = 2048,
    local_prefill_size: Annotated[
        int, typer.Option(help="Decode: of these, tokens of prompts that are computed here.")
    ] = 256,
    max_running_requests: Annotated[int, typer.Option(help="Requests computed together.")] = 256,
    max_queued_requests: Annotated[int, typer.Option(help="Requests waiting, beyond that: 503.")] = 4096,
    num_reserved_decode_tokens: ReservedTokensOption = 512,
    retraction_host_memory: HostMemoryOption = "1G",
    schedule_policy: PolicyOption = SchedulePolicy.FCFS,
    enable_priority: PriorityOption = False,
    disable_overlap_schedule: Annotated[
        bool, typer.Option("--disable-overlap-schedule", help="Plan a step when the one before it has ended.")
    ] = False,
    request_timeout: RequestTimeoutOption = None,
    speculative_algorithm: AlgorithmOption = None,
    speculative_num_draft_tokens: NumDraftTokensOption = 4,
    speculative_ngram_max_match: MaxMatchOption = 8,
    speculative_draft_model: DraftModelOption = None,
    kv_events_config: KVEventsOption = None,
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
    from splitserve.launch.node_place import own_address

    defaults = DisaggregationConfig()
    place = settle_place(host, port, disaggregation_bootstrap_port, router or (), join)
    check_nodes(nnodes, node_rank, dist_init_addr)
    node_host = "" if dist_init_addr is None else own_address(node_rank, dist_init_addr, host, load_timeout)
    if host in (None, *WILDCARDS):
        # Peers reach a node that was told no address of its own by the one that the other nodes know.
        disaggregation_host = disaggregation_host or place.peer_host or node_host or None
    disaggregation_host = disaggregation_host or place.peer_host
    is_wildcard = place.host in WILDCARDS
    needs_address = place.router_urls or disaggregation_mode is not DisaggregationMode.NULL
    if is_wildcard and disaggregation_host is None and needs_address:
        raise ConfigError(f"--host {host!r} is no address that others can reach: give that as --disaggregation-host")
    peer_host = defaults.host if is_wildcard else place.host
    token = defaults.cluster_token
    # A colocated worker needs none until it becomes one of a pair.
    needs_token = disaggregation_mode is not DisaggregationMode.NULL or nnodes > 1
    if cluster_token_file is not None and (needs_token or cluster_token_file.exists()):
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
            attention_backend=attention_backend,
            expert_parallel=enable_expert_parallel,
            dp_attention=enable_dp_attention,
            cuda_graph_max_batch=0 if disable_cuda_graph else cuda_graph_max_bs,
            load_timeout=load_timeout,
        ),
        cache=CacheConfig(
            page_size=page_size,
            max_total_tokens=max_total_tokens,
            mem_fraction=mem_fraction_static,
            enable_prefix_cache=not disable_radix_cache,
            enable_decode_prefix_cache=decode_prefix_cache,
            prefix_host_memory=num_bytes(prefix_host_memory, "--prefix-host-memory"),
            shared_pool=None if shared_pool is None else str(shared_pool),
            swa_full_tokens_ratio=swa_full_tokens_ratio,
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=chunked_prefill_size,
            local_prefill_size=local_prefill_size,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            grammar_timeout=grammar_timeout,
            num_reserved_decode_tokens=num_reserved_decode_tokens,
            retraction_host_memory=num_bytes(retraction_host_memory, "--retraction-host-memory"),
            schedule_policy=schedule_policy,
            enable_priority=enable_priority,
            overlap_schedule=not disable_overlap_schedule,
            request_timeout=request_timeout,
        ),
        speculative=SpeculativeConfig(
            algorithm=speculative_algorithm,
            num_draft_tokens=speculative_num_draft_tokens,
            ngram_max_match=speculative_ngram_max_match,
            draft_model=speculative_draft_model,
        ),
        disaggregation=DisaggregationConfig(
            mode=disaggregation_mode,
            transfer_backend=disaggregation_transfer_backend,
            transfer_dtype=transfer_dtype,
            transfer_checksum=transfer_checksum,
            transfer_options=named_values(transfer_option or (), "--transfer-option"),
            host=disaggregation_host or peer_host,
            cluster_token=token,
            bootstrap_port=place.bootstrap_port,
            bootstrap_timeout=bootstrap_timeout,
            transfer_timeout=transfer_timeout,
        ),
        server=ServerConfig(
            host=place.host,
            port=place.port,
            served_model_name=served_model_name,
            router_urls=place.router_urls,
            router_key_file=None if router_key_file is None else str(router_key_file),
            router_certificate=None if router_certificate is None else str(router_certificate),
            ssl_certfile=None if ssl_certfile is None else str(ssl_certfile),
            ssl_keyfile=None if ssl_keyfile is None else str(ssl_keyfile),
            ssl_ca_certs=None if ssl_ca_certs is None else str(ssl_ca_certs),
            api_key_file=None if api_key_file is None else str(api_key_file),
            log_level=log_level,
        ),
        kv_events=KVEventsConfig() if kv_events_config is None else KVEventsConfig.from_cli(kv_events_config),
        parallel=ParallelConfig(
            tp_size=tp_size,
            pp_size=pp_size,
            pp_layers=() if pp_layers is None else stage_sizes(pp_layers, "--pp-layers"),
            nnodes=nnodes,
            node_rank=node_rank,
            dist_init_addr=dist_init_addr or "",
            node_host=node_host,
        ),
        dp_size=dp_size,
    )
    check_worker(config)
    from splitserve.launch.worker import ProcessOptions, run_worker

    options = ProcessOptions(
        ready_file=ready_file,
        exit_with_parent=exit_with_parent,
        load_timeout=load_timeout,
        drain_timeout=drain_timeout,
    )
    if node_rank > 0:
        from splitserve.launch.node_process import run_node

        raise typer.Exit(run_node(config, options))
    raise typer.Exit(run_worker(config, options=options))
