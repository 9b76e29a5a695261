"""Checks of the command lines of a cluster's processes before any process starts, by the code of those processes."""

from __future__ import annotations

from typing import Any

import typer

from splitserve.cli.command import USAGE_ERROR, Command, usage_problem
from splitserve.cli.familiar import with_own_names
from splitserve.cli.router_options import router, router_config
from splitserve.cli.serve import serve
from splitserve.cli.worker_options import worker_config
from splitserve.core.errors import ConfigError
from splitserve.deploy.config import OWN_WORKER_OPTIONS, ClusterConfig
from splitserve.worker.join import settle_place


def check_cluster(config: ClusterConfig, *, is_local: bool) -> None:
    """Raise ConfigError for an option or a model that a process would reject.

    `is_local`: processes run on this machine.
    """
    from splitserve.api.tls import tls_files
    from splitserve.deploy.commands import router_args, worker_args
    from splitserve.engine.sources import resolve_model
    from splitserve.worker.preflight import check_preflight

    args = router_config(_values(router, router_args(config), "router.args"))
    tls_files(args.ssl_certfile, args.ssl_keyfile)
    folder = resolve_model(config.model) if is_local else None
    for name, pool in config.pools.by_name().items():
        for word in with_own_names("serve", [*config.worker_args, *pool.args]):
            if where := OWN_WORKER_OPTIONS.get(word.partition("=")[0]):
                raise ConfigError(f"pools.{name}.args or worker_args: {word} is not for here; say {where}")
        values = _values(serve, worker_args(config, name, threads=1), f"pools.{name}.args or worker_args")
        worker = worker_config(config.model, values, settle_place(None, 0, 0, (), None))
        if folder is not None and pool.replicas:
            check_preflight(worker, folder)


def _values(function: Any, words: list[str], where: str) -> dict[str, Any]:
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=Command)(function)
    try:
        context: Any = typer.main.get_command(app).make_context(words[0], words[1:])
    except USAGE_ERROR as error:
        raise ConfigError(f"{where}: {usage_problem(error)} (splitserve {words[0]} --help)") from None
    values: dict[str, Any] = context.params
    return values
