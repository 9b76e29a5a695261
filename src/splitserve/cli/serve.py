"""`splitserve serve` and `splitserve router`: one process each, with the config that its options describe."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import typer

from splitserve.cli.command import USAGE_ERROR, Command, usage_problem, with_own_names
from splitserve.cli.options import MODEL, takes
from splitserve.core.config import ClusterToken, DisaggregationConfig, ServerConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.options import fill, options_of, replaced
from splitserve.core.request import FAKE_BACKEND, DisaggregationMode
from splitserve.deploy.config import OWN_WORKER_OPTIONS, ClusterConfig
from splitserve.ranks.launch import WILDCARDS, LaunchConfig, WorkerAddress, own_address, settle_place
from splitserve.router.args import LBArgs, RouterProcessConfig
from splitserve.transfer.transports import WORKER_BACKENDS, options_help
from splitserve.worker.checks import check_combinations, check_nodes, check_worker

_WORKER_DEFAULTS = WorkerConfig(server=ServerConfig(log_level="info"))
# What only the transports know of two options.
_FROM_TRANSPORTS: Mapping[str, Any] = {
    "disaggregation_transfer_backend": {"choices": WORKER_BACKENDS},
    "transfer_option": {"help": f"Setting of the transfer backend, repeatable. {options_help()}."},
}
WORKER_OPTIONS = tuple(
    msgspec.structs.replace(option, **_FROM_TRANSPORTS.get(option.name, {}))
    for option in (*options_of(_WORKER_DEFAULTS), *options_of(LaunchConfig()))
)
ROUTER_OPTIONS = (*options_of(LBArgs()), *options_of(RouterProcessConfig()))


@takes(MODEL, *WORKER_OPTIONS)
def serve(ctx: typer.Context, model: str, **values: Any) -> None:
    """Run one worker: colocated, prefill or decode. `splitserve up` runs a router and workers in one command."""
    raise typer.Exit(run_serve(model, values))


def run_serve(model: str, values: Mapping[str, Any]) -> int:
    """Run one worker with these values of its options, until it ends. Return the exit code. Raises ConfigError."""
    from splitserve.core.environment import set_compile_cache

    # For processes without a head start.
    set_compile_cache()
    from splitserve.worker.start import run_worker

    launch: LaunchConfig = fill(LaunchConfig(), values)
    place = settle_place(
        launch.host, launch.port, launch.disaggregation_bootstrap_port, launch.router or (), launch.join
    )
    nnodes, node_rank, address = values["nnodes"], values["node_rank"], values["dist_init_addr"]
    token = _token(launch, values)
    # A combination that cannot work is reported before options that it lacks, so before a missing token, too.
    given = token or ClusterToken(b"checked by worker_config")
    changes = {"disaggregation.cluster_token": given, "server.router_urls": place.router_urls}
    check_combinations(replaced(fill(_WORKER_DEFAULTS, values), changes))
    check_nodes(nnodes, node_rank, address)
    node_host = ""
    if address is not None:
        node_host = own_address(node_rank, address, launch.host, values["load_timeout"])
    config = worker_config(model, values, place, node_host=node_host, token=token)
    if node_rank > 0:
        from splitserve.process.forks import end_early
        from splitserve.ranks.node_process import run_node

        # `give_head_start` does not see an option in the file of `--config`.
        end_early()
        return run_node(config, launch)
    return run_worker(config, launch)


@takes(*ROUTER_OPTIONS)
def router(ctx: typer.Context, **values: Any) -> None:
    """Run the router. Its workers are options here, or register themselves (splitserve serve --router URL)."""
    from splitserve.router.app import run_router

    process = fill(RouterProcessConfig(), values)
    raise typer.Exit(run_router(fill(LBArgs(), values), **msgspec.structs.asdict(process)))


def worker_config(
    model: str,
    values: Mapping[str, Any],
    place: WorkerAddress,
    *,
    node_host: str = "",
    token: ClusterToken | None = None,
    is_local: bool = True,
) -> WorkerConfig:
    """Return the config of a worker from the values of its options and its listening address.

    `node_host`: this host's address if the ranks are on several hosts. `is_local`: it runs on this machine. Raises
    ConfigError.
    """
    changes: dict[str, Any] = {
        "model.model": model,
        "server.host": place.host,
        "server.port": place.port,
        "server.router_urls": place.router_urls,
        "parallel.node_host": node_host,
        "disaggregation.host": _peer_host(values, place, node_host),
        "disaggregation.bootstrap_port": place.bootstrap_port,
        "disaggregation.cluster_token": token or ClusterToken(),
    }
    if values["disable_cuda_graph"]:
        changes["model.cuda_graph_max_batch"] = 0
    config: WorkerConfig = replaced(fill(_WORKER_DEFAULTS, values), changes)
    check_worker(config, is_local=is_local)
    return config


def check_cluster(config: ClusterConfig, *, is_local: bool) -> None:
    """Raise ConfigError for an option or a model that a process of a cluster would reject, before any starts.

    `is_local`: processes run on this machine.
    """
    from splitserve.api.tls import tls_files
    from splitserve.deploy.commands import router_args, worker_args
    from splitserve.engine.sources import resolve_model
    from splitserve.worker.preflight import check_preflight

    # The router's process gets its key files beside its command line.
    keys = {"api_key_file": config.keys.clients, "operator_key_file": config.keys.operators}
    args: LBArgs = fill(LBArgs(), {**values_of(router, router_args(config), "router.args"), **keys})
    tls_files(args.ssl_certfile, args.ssl_keyfile)
    folder = resolve_model(config.model) if is_local else None
    for name, pool in config.pools.by_name().items():
        for word in with_own_names("serve", [*config.worker_args, *pool.args]):
            if where := OWN_WORKER_OPTIONS.get(word.partition("=")[0]):
                raise ConfigError(f"pools.{name}.args or worker_args: {word} cannot be set here; set {where}")
        values = values_of(serve, worker_args(config, name, threads=1), f"pools.{name}.args or worker_args")
        worker = worker_config(config.model, values, settle_place(None, 0, 0, (), None), is_local=is_local)
        if worker.disaggregation.transfer_backend == FAKE_BACKEND:
            raise OptionError(
                "--transfer-backend", f"{FAKE_BACKEND} is for one worker without a router: run splitserve serve"
            )
        if folder is not None and pool.replicas:
            check_preflight(worker, folder)


@functools.cache
def click_command(function: Any) -> Any:
    """Return a command, with its parameters."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=Command)(function)
    return typer.main.get_command(app)


def values_of(function: Any, words: list[str], where: str) -> dict[str, Any]:
    """Return the values of the options of a process. `where`: source of the words, for errors. Raises ConfigError."""
    try:
        context: Any = click_command(function).make_context(words[0], words[1:])
    except USAGE_ERROR as error:
        raise ConfigError(f"{where}: {usage_problem(error)} (splitserve {words[0]} --help)") from None
    values: dict[str, Any] = context.params
    return values


def _peer_host(values: Mapping[str, Any], place: WorkerAddress, node_host: str) -> str:
    """Return the address at which other workers reach this one. Raises OptionError."""
    found: str | None = values["disaggregation_host"] or place.peer_host
    if values["host"] in (None, *WILDCARDS):
        # A node without its own address is reached at the address that the other nodes use.
        found = found or node_host or None
    if found is not None:
        return found
    if place.host not in WILDCARDS:
        return place.host
    if place.router_urls or values["disaggregation_mode"] is not DisaggregationMode.NULL:
        raise OptionError(
            "--host", f"{place.host!r} is no address that others can reach: give that as --disaggregation-host"
        )
    return DisaggregationConfig().host


def _token(launch: LaunchConfig, values: Mapping[str, Any]) -> ClusterToken | None:
    from splitserve.process.cluster_token import read_token_file

    path = launch.cluster_token_file
    # A colocated worker needs a token only when its role changes to prefill or decode.
    is_needed = values["disaggregation_mode"] is not DisaggregationMode.NULL or values["nnodes"] > 1
    return None if path is None or not (is_needed or path.exists()) else read_token_file(path)
