"""TLS contexts for connections to workers: trusted authorities, and the client's own certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

from splitserve.core.errors import ConfigError

CA_OPTION, CERT_OPTION, KEY_OPTION = "--worker-ssl-ca-certs", "--worker-ssl-certfile", "--worker-ssl-keyfile"


def worker_tls(ca_certs: Path | None, certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """Return the context for workers at https URLs.

    None: no own certificate, and the certificates that the system trusts.

    `ca_certs`: authority of the workers' certificates. `certfile`, `keyfile`: for workers that require a certificate.
    Raises ConfigError.
    """
    if ca_certs is None and certfile is None and keyfile is None:
        return None
    if (certfile is None) != (keyfile is None):
        raise ConfigError(f"{CERT_OPTION} and {KEY_OPTION} need each other")
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{CA_OPTION} {ca_certs}: {error.strerror or 'no PEM certificate'}") from None
    if certfile is not None:
        try:
            # An empty password, because no user can enter one.
            context.load_cert_chain(certfile, keyfile, password="")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(f"{CERT_OPTION} {certfile} and {KEY_OPTION} {keyfile} cannot be used: {reason}") from None
    return context
