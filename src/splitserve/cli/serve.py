"""`splitserve serve`: one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from splitserve.cli.derive import takes
from splitserve.cli.options import ModelArgument
from splitserve.cli.worker_options import WORKER_DEFAULTS, WORKER_OPTIONS, worker_config
from splitserve.core.config import ClusterToken
from splitserve.core.request import DisaggregationMode
from splitserve.worker.checks import check_nodes
from splitserve.worker.join import settle_place


@takes((WORKER_DEFAULTS, WORKER_OPTIONS))
def serve(ctx: typer.Context, model: ModelArgument = "smollm2", **values: Any) -> None:
    """Run one worker: colocated, prefill or decode."""
    from splitserve.engine.sources import set_compile_cache

    # Set it before torch is imported, here and in the processes that inherit the environment.
    set_compile_cache()
    from splitserve.worker.node_place import own_address
    from splitserve.worker.worker import ProcessOptions, run_worker

    place = settle_place(
        values["host"], values["port"], values["disaggregation_bootstrap_port"], values["router"] or (), values["join"]
    )
    nnodes, node_rank, address = values["nnodes"], values["node_rank"], values["dist_init_addr"]
    check_nodes(nnodes, node_rank, address)
    node_host = ""
    if address is not None:
        node_host = own_address(node_rank, address, values["host"], values["load_timeout"])
    config = worker_config(model, values, place, node_host=node_host, token=_token(values))
    options = ProcessOptions(
        ready_file=values["ready_file"],
        exit_with_parent=values["exit_with_parent"],
        load_timeout=values["load_timeout"],
        drain_timeout=values["drain_timeout"],
    )
    if node_rank > 0:
        from splitserve.worker.node_process import run_node

        raise typer.Exit(run_node(config, options))
    raise typer.Exit(run_worker(config, options=options))


def _token(values: dict[str, Any]) -> ClusterToken | None:
    from splitserve.process.cluster_token import read_token_file

    path: Path | None = values["cluster_token_file"]
    # A colocated worker needs a token only when its role changes to prefill or decode.
    is_needed = values["disaggregation_mode"] is not DisaggregationMode.NULL or values["nnodes"] > 1
    return None if path is None or not (is_needed or path.exists()) else read_token_file(path)
