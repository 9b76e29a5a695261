"""`splitserve certs`: certificates for TLS between the router and the workers of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

certs_app = typer.Typer(
    name="certs", help="Certificates for TLS between router and workers.", no_args_is_help=True, rich_markup_mode=None
)


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
