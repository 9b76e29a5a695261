"""The files that make a server speak TLS, looked at before it starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from splitserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM: the server's certificate with those that it rests on, and the key of the first."""

    certfile: Path
    keyfile: Path


def tls_files(certfile: Path | None, keyfile: Path | None) -> TlsFiles | None:
    """What `--ssl-certfile` and `--ssl-keyfile` name; None: no TLS. Raises ConfigError where they cannot be used."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ConfigError("--ssl-certfile and --ssl-keyfile need each other")
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{option} {path}: {error.strerror}") from None
    try:
        # An empty password: a server has nobody to ask for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used together ({reason}): give a PEM "
            "certificate and its PEM key without a password"
        ) from None
    return TlsFiles(certfile, keyfile)
