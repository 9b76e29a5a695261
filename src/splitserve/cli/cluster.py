"""`splitserve cluster`: clusters of many machines from one file. `splitserve certs`: certificates for their TLS."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from splitserve.api.api_keys import first_key
from splitserve.cli.command import CommandGroup
from splitserve.cli.serve import check_cluster
from splitserve.core.config import ServerConfig
from splitserve.core.errors import ConfigError, DeadlineExceededError, WorkerUnavailableError
from splitserve.core.options import option_of
from splitserve.deploy.config import load_config
from splitserve.process.lifecycle import ready_path
from splitserve.router.args import parse_url

if TYPE_CHECKING:
    from splitserve.deploy.control import ClusterStatus

cluster_app = typer.Typer(
    name="cluster",
    cls=CommandGroup,
    help="Clusters of many machines from one file: docs/cluster.md.",
    no_args_is_help=True,
)
render_app = typer.Typer(name="render", help="Convert a cluster file for other systems.", no_args_is_help=True)
cluster_app.add_typer(render_app)
certs_app = typer.Typer(
    name="certs",
    cls=CommandGroup,
    help="Certificates for TLS between router and workers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Cluster file, see docs/cluster.md.")]
NameOption = Annotated[
    str | None,
    typer.Option(
        help="Name of the cluster in its file.",
        show_default="splitserve, or the only cluster of this user if it has another name",
    ),
]
WaitOption = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Wait at most this long for the desired state of the cluster.")
]
_ROUTER_KEY = option_of(ServerConfig, "router_key_file")
# Seconds between two status requests.
_POLL_INTERVAL = 0.3
_DOWN_POLL_INTERVAL = 0.05


@cluster_app.command()
def up(
    config: ConfigArgument,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on this Ray cluster (HOST:PORT, or auto). Default: on this machine."),
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write a JSON file here when ready.")] = None,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", help="End when standard input ends.")] = False,
) -> None:
    """Start a cluster and keep it in the state that the file describes. Ctrl-C drains."""
    from splitserve.core.environment import set_compile_cache
    from splitserve.deploy.up import run_cluster_up

    # The processes that import torch inherit it.
    set_compile_cache()
    loaded = load_config(config)
    check_cluster(loaded, is_local=ray is None)
    if ready_file is not None:
        ready_path(str(ready_file), "--ready-file")
    raise typer.Exit(run_cluster_up(loaded, ray, ready_file=ready_file, exit_with_parent=exit_with_parent))


@cluster_app.command()
def status(
    name: NameOption = None,
    wait: WaitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Show every process of a cluster. Exit code 1: the cluster is not in its desired state."""
    from splitserve.deploy.control import describe

    deadline = time.monotonic() + (wait or 0.0)
    while not ((found := _status(name, deadline)).is_ready or found.failed) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
    typer.echo(msgspec.json.encode(found).decode() if as_json else describe(found))
    raise typer.Exit(0 if found.is_ready else 1)


@cluster_app.command()
def scale(
    pools: Annotated[list[str], typer.Argument(metavar="POOL=N...", help="Workers per pool, e.g. decode=4.")],
    name: NameOption = None,
    wait: WaitOption = None,
) -> None:
    """Change the number of workers in a pool. Removed workers finish their requests or migrate them."""
    from splitserve.deploy.control import find_cluster, summary

    counts = _counts(pools)
    client = find_cluster(name)
    found = client.scale(counts)
    deadline = time.monotonic() + (wait or 0.0)
    while wait is not None and not (found := client.status()).is_ready:
        if found.failed:
            raise ConfigError(
                f"{', '.join(found.failed)} cannot be started: splitserve cluster status --name {client.name} says why"
            )
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"not so after {wait:g} s: splitserve cluster status --name {client.name} says why"
            )
        time.sleep(_POLL_INTERVAL)
    typer.echo(summary(found))


@cluster_app.command()
def down(
    name: NameOption = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for running requests.")] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds to wait for the end of all processes.")
    ] = 300.0,
) -> None:
    """Stop a cluster after its running requests have finished."""
    from splitserve.deploy.control import find_cluster

    client = find_cluster(name)
    client.down(now=now)
    typer.echo(f"{client.name}: going down")
    deadline = time.monotonic() + wait
    while client.is_up():
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"still up after {wait:g} s: splitserve cluster down --name {client.name} --now"
            )
        time.sleep(_DOWN_POLL_INTERVAL)


WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER_URL", help="URL of the worker, as in GET /workers.")]
RouterOption = Annotated[str, typer.Option(metavar="URL", help="URL of the router that gets the order.")]
RouterKeyOption = Annotated[
    Path | None, typer.Option(metavar=_ROUTER_KEY.metavar, envvar=_ROUTER_KEY.env or None, help=_ROUTER_KEY.help)
]


@cluster_app.command()
def drain(
    worker: WorkerArgument,
    router: RouterOption,
    migrate: Annotated[bool, typer.Option("--migrate", help="Migrate running requests to other workers now.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds for running requests to finish.")] = 120.0,
    force: Annotated[bool, typer.Option("--force", help="Drain even if no other worker can serve meanwhile.")] = False,
    router_key_file: RouterKeyOption = None,
) -> None:
    """Send a worker no new requests and wait until none runs there, for example before removing its machine."""
    import asyncio

    from splitserve.deploy.router_client import drain_worker

    urls, key = (parse_url(router), parse_url(worker)), _operator_key(router_key_file)
    asyncio.run(drain_worker(*urls, migrate=migrate, force=force, timeout=timeout, operator_key=key))
    key_words = () if router_key_file is None else ("--router-key-file", str(router_key_file))
    resuming = shlex.join(("splitserve", "cluster", "resume", worker, "--router", router, *key_words))
    typer.echo(f"{worker} is drained: it gets no new requests, and none runs there; to end this: {resuming}")


@cluster_app.command()
def resume(worker: WorkerArgument, router: RouterOption, router_key_file: RouterKeyOption = None) -> None:
    """Send a drained worker new requests again. The router forgets the worker's failures."""
    import asyncio

    from splitserve.deploy.router_client import resume_worker

    key = _operator_key(router_key_file)
    asyncio.run(resume_worker(parse_url(router), parse_url(worker), operator_key=key))
    typer.echo(f"{worker} gets new requests again")


def _operator_key(file: Path | None) -> str | None:
    return None if file is None else first_key(file, "--router-key-file")


@render_app.command()
def k8s(config: ConfigArgument) -> None:
    """Print Kubernetes manifests for the cluster."""
    from splitserve.deploy.kubernetes import render

    loaded = load_config(config)
    check_cluster(loaded, is_local=False)
    typer.echo(render(loaded), nl=False)


@certs_app.callback()
def _group() -> None:
    """Certificates for TLS between router and workers."""


@certs_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the certificates and keys.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Name or address at which a router or worker is reached; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace existing certificates and keys.")] = False,
) -> None:
    """Create a certificate authority, and with it a certificate for routers and one for workers."""
    from splitserve.deploy.certs import init_certs

    for path in init_certs(folder, host or (), days=days, force=force):
        typer.echo(path)
    typer.echo(
        f"workers: splitserve serve ... --ssl-certfile {folder}/worker.pem --ssl-keyfile {folder}/worker-key.pem "
        f"--ssl-ca-certs {folder}/ca.pem\n"
        f"routers: splitserve router ... --worker-ssl-certfile {folder}/router.pem "
        f"--worker-ssl-keyfile {folder}/router-key.pem --worker-ssl-ca-certs {folder}/ca.pem\n"
        f"Keep {folder}/ca-key.pem on no host of the cluster: it can create certificates that all of them trust."
    )


def _status(name: str | None, deadline: float) -> ClusterStatus:
    """Return the status of a cluster. Waits for its supervisor. Raises WorkerUnavailableError at the deadline."""
    from splitserve.deploy.control import find_cluster

    while True:
        try:
            return find_cluster(name).status()
        except WorkerUnavailableError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_INTERVAL)


def _counts(words: list[str]) -> dict[str, int]:
    """Parse the numbers of workers per pool. Raises ConfigError."""
    counts = {}
    for word in words:
        pool, equals, number = word.partition("=")
        if not (equals and number.isdecimal()):
            raise ConfigError(f"{word!r}: write POOL=N, e.g. decode=4")
        if pool in counts:
            raise ConfigError(f"{word!r}: {pool} occurs twice; give one number of workers")
        counts[pool] = int(number)
    return counts
