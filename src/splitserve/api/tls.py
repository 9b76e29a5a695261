"""TLS: the files of a server, checked before startup, and the contexts of clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from splitserve.core.errors import OptionError

_BEGIN_OF_CERTIFICATE, _END_OF_CERTIFICATE = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server: its certificate with the chain of issuers, and its private key."""

    certfile: Path
    keyfile: Path
    # Authorities of the certificates that clients must present. None: clients need no certificate.
    ca_certs: Path | None = None


def trust_only(pem: bytes, source: str) -> ssl.SSLContext:
    """Return a client's context for a server that presents the first certificate in `pem`, and for no other.

    The host name is not compared. `source`: the option that named it, for the error. Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate of a server is trusted although it is not its own issuer.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        first, end, _ = pem.decode().partition(_END_OF_CERTIFICATE)
        context.load_verify_locations(cadata=first[first.index(_BEGIN_OF_CERTIFICATE) :] + end)
    except (ValueError, ssl.SSLError):
        option, _, value = source.partition(" ")
        problem = f"{value}: no PEM certificate; give the file of the router's --ssl-certfile"
        raise OptionError(option, problem) from None
    return context


def tls_files(certfile: Path | None, keyfile: Path | None, ca_certs: Path | None = None) -> TlsFiles | None:
    """Return the files of `--ssl-certfile`, `--ssl-keyfile`, `--ssl-ca-certs`. None: no TLS.

    Raises ConfigError for files that cannot be used.
    """
    if ca_certs is not None and certfile is None:
        raise OptionError("--ssl-ca-certs", "needs --ssl-certfile and --ssl-keyfile")
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise OptionError("--ssl-certfile", "and --ssl-keyfile need each other")
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            path.read_bytes()
        except OSError as error:
            raise OptionError(option, f"{path}: {error.strerror}") from None
    try:
        # An empty password, because a server cannot prompt for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise OptionError(
            "--ssl-certfile",
            f"{certfile} and --ssl-keyfile {keyfile} cannot be used together ({reason}): give a PEM "
            "certificate and its PEM key without a password",
        ) from None
    if ca_certs is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise OptionError("--ssl-ca-certs", f"{ca_certs}: {error.strerror or 'no PEM certificate'}") from None
    return TlsFiles(certfile, keyfile, ca_certs)


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
        raise OptionError(CERT_OPTION, f"and {KEY_OPTION} need each other")
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(CA_OPTION, f"{ca_certs}: {error.strerror or 'no PEM certificate'}") from None
    if certfile is not None:
        try:
            # An empty password, because no user can enter one.
            context.load_cert_chain(certfile, keyfile, password="")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise OptionError(CERT_OPTION, f"{certfile} and {KEY_OPTION} {keyfile} cannot be used: {reason}") from None
    return context
