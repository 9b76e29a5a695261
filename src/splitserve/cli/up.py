"""`splitserve up`: a router and workers on this machine, with the options of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from msgspec.structs import replace

from splitserve.cli.command import Command, renamed
from splitserve.cli.options import MODEL, takes, words_of
from splitserve.cli.serve import ROUTER_OPTIONS, WORKER_OPTIONS, check_cluster
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.options import Option, fill, options_of
from splitserve.deploy.config import OWN_WORKER_OPTIONS, SupervisionConfig
from splitserve.tools.options import UpOptions

# Options of the supervision that `up` has, each with the help text if that differs from the cluster file's.
_SUPERVISION_HELP = {
    "max_failed_starts": "Failed starts of one process in a row after which `up` ends with the reason.",
    "load_timeout": "",
    "drain_timeout": "",
}
_SUPERVISION = SupervisionConfig(max_failed_starts=3)
_SUPERVISION_OPTIONS = tuple(
    replace(option, section="Supervision", help=_SUPERVISION_HELP[option.name] or option.help)
    for option in options_of(_SUPERVISION)
    if option.name in _SUPERVISION_HELP
)
_SIZES = ("tp_size", "pp_size", "dp_size")
# Options that workers and router both have, and that apply to both. All other common ones apply to the router alone.
_FOR_BOTH = {option.name for option in ROUTER_OPTIONS if option.section == "Limits"}
# The TLS options of `up` apply to its router: workers are on this machine.
_OF_LOGS = {"log_level", "log_format"}
_NOT_OF_UP = {*_FOR_BOTH, *_OF_LOGS, "pp_layers", "shared_pool", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"}
_WORKER_OPTIONS = {
    option.name: option
    for option in WORKER_OPTIONS
    if option.name in _SIZES or (option.flag not in OWN_WORKER_OPTIONS and option.name not in _NOT_OF_UP)
}
# Options of the router by their names in `up`.
_ROUTER_OPTIONS = {
    f"router_{option.name}" if option.name in _WORKER_OPTIONS else option.name: option
    for option in ROUTER_OPTIONS
    if option.section != "Workers"
    and option.name not in {"model", "fd", "ready_file", "exit_with_parent", "drain_timeout"}
    and not option.name.startswith("worker_ssl")
}
# Options of `splitserve serve` that `up` sets itself, each with a hint for the user.
_SET_BY_UP = {
    "--disaggregation-mode": "give numbers of workers: --prefill N --decode N, or --prefill 0 --decode 0 --null N",
    "--router": "workers register with the router that is started here",
    "--join": "workers register with the router that is started here",
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr"), "workers of `up` are on this machine"),
    "--pp-layers": "stages of `up` are as even as possible: start such a worker by `splitserve serve`",
}


# Options that workers do not have, or that only the router takes from `up`.
_BEFORE_DASHES = {
    *(option.flag for option in options_of(UpOptions()) if option.name != "threads"),
    *(replace(option, name=name).flag for name, option in _ROUTER_OPTIONS.items() if name not in _FOR_BOTH | _OF_LOGS),
}


class UpCommand(Command):
    """Command with an optional `--` before the options of workers. All other options must precede it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        for i, name in enumerate(word.partition("=")[0] for word in args):
            after = " after --" if i > cut else ""
            if after and name == "--port":
                raise ConfigError("--port after --: workers take free ports; give the router's --port before --")
            if after and renamed("up", name) in _BEFORE_DASHES:
                raise ConfigError(f"{name} after --: only options of workers may follow; give it before --")
            if reason := _SET_BY_UP.get(renamed("up", name)):
                raise ConfigError(f"{name}{after}: {reason}")
        return super().parse_args(ctx, args[:cut] + args[cut + 1 :])


@takes(
    MODEL,
    *options_of(UpOptions()),
    *_SUPERVISION_OPTIONS,
    *(replace(option, name=name) for name, option in _ROUTER_OPTIONS.items()),
    *_WORKER_OPTIONS.values(),
)
def up(ctx: typer.Context, model: str, **values: Any) -> None:
    """Serve a model on this machine: a router, prefill and decode workers. Ctrl-C drains.

    Options of `splitserve serve` apply to all workers, those of `splitserve router` to the router. --log-level,
    --log-format and limits apply to both. The router's --max-running-requests is --router-max-running-requests here.
    """
    from splitserve.core.environment import set_compile_cache
    from splitserve.deploy.deployment import LocalDeployment
    from splitserve.deploy.up import run_cluster_up
    from splitserve.process.settings import setup_logger

    # For processes without a head start.
    set_compile_cache()
    setup_logger(values["log_level"], values["log_format"])
    options: UpOptions = fill(UpOptions(), values)
    _check_files(values)
    worker_args = ["--served-model-name", model, *_given(ctx, _WORKER_OPTIONS)]
    worker_args += _given(ctx, {key: option for key, option in _ROUTER_OPTIONS.items() if key in _FOR_BOTH})
    own = {"host", "port", *_OF_LOGS}
    router_args = _given(ctx, {key: option for key, option in _ROUTER_OPTIONS.items() if key not in own})
    if options.prefill and (sizes := [size for size in _SIZES if values[size] != 1]):
        name = sizes[0].replace("_", "-")
        raise OptionError(f"--{name}", f": give --prefill-{name} and --decode-{name}")
    prefill_shape, decode_shape = options.pair.shapes
    deployment = LocalDeployment(
        model=model,
        prefill=options.prefill,
        decode=options.decode,
        null=options.null,
        prefill_shape=prefill_shape,
        decode_shape=decode_shape,
        dtype=values["dtype"],
        backend=values["disaggregation_transfer_backend"],
        host=values["host"],
        port=values["port"],
        threads=options.pair.threads,
        worker_args=worker_args,
        router_args=router_args,
        cluster_token_file=options.cluster_token_file,
        hand_over=options.pair.hand_over,
        supervision=fill(_SUPERVISION, values),
        log_level=values["log_level"],
        log_format=values["log_format"],
    )
    with deployment.shared_pool() as pool:
        config = deployment.config(pool)
        check_cluster(config, is_local=True)
        raise typer.Exit(run_cluster_up(config))


def _check_files(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a token or key file that cannot be read."""
    from splitserve.api.api_keys import read_keys
    from splitserve.process.cluster_token import read_token_file

    if values["cluster_token_file"] is not None:
        read_token_file(values["cluster_token_file"])
    for key in ("api_key_file", "operator_key_file", "worker_key_file"):
        if values[key] is not None:
            read_keys(values[key], f"--{key.replace('_', '-')}")


def _given(ctx: typer.Context, options: Mapping[str, Option]) -> list[str]:
    """Return the words of the options that the user gave, for the process that takes them.

    A default in the file of `--config` is not given: `--print-config` writes all of them.
    """
    words = []
    for param in ctx.command.params:
        source = getattr(ctx.get_parameter_source(str(param.name)), "name", "DEFAULT")
        if param.name not in options or source == "DEFAULT":
            continue
        if source != "DEFAULT_MAP" or ctx.params[param.name] != options[param.name].default:
            first, *rest = words_of(param, ctx.params[param.name])
            is_renamed = options[param.name].name != param.name
            words += [options[param.name].flag if is_renamed else first, *rest]
    return words
