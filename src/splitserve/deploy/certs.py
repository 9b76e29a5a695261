"""`splitserve certs init`: a certificate authority of one cluster, and the certificates of its router and workers.

The program `openssl` creates them. The certificates of routers and workers are for servers and for clients.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from splitserve.core.errors import ConfigError, OptionError

AUTHORITY, LEAVES = "ca", ("router", "worker")
# Every certificate is valid for these hosts.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# 100 years: a certificate's dates end with the year 9999.
_MAX_DAYS = 36_500
_TIMEOUT_SECONDS = 60.0
_CONFIG = """
[req]
prompt = no
distinguished_name = name
[name]
O = Splitserve
CN = {name}
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {hosts}
"""


def init_certs(folder: Path, hosts: Sequence[str], *, days: int, force: bool) -> list[Path]:
    """Write NAME.pem and NAME-key.pem of the authority, the router and the workers. Return the paths.

    `hosts`: names and addresses, besides `LOCAL_HOSTS`, at which the router and the workers are reached. `force`:
    replace existing files. Raises ConfigError.
    """
    if not 1 <= days <= _MAX_DAYS:
        raise OptionError("--days", f"{days}: give 1 to {_MAX_DAYS}")
    alt_names = ", ".join(_alt_name(host) for host in dict.fromkeys((*LOCAL_HOSTS, *hosts)))
    if shutil.which("openssl") is None:
        raise ConfigError("certs init needs the program openssl: install it")
    names = (AUTHORITY, *LEAVES)
    files = [folder / file for name in names for file in (f"{name}.pem", f"{name}-key.pem")]
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise ConfigError(f"{', '.join(existing)} exist: give another folder, or --force to replace them")
    created: list[Path] = []
    try:
        created += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name in names:
                _create(Path(scratch), name, alt_names, days)
            for path in files:
                (Path(scratch) / path.name).replace(path)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): give another folder") from None
    finally:
        # Removes nothing after a success, because the folder is not empty then.
        for path in created:
            with suppress(OSError):
                path.rmdir()
    return files


def _create(folder: Path, name: str, alt_names: str, days: int) -> None:
    """Create one certificate and its key. That of the authority comes first, because it signs the others."""
    is_authority = name == AUTHORITY
    config = folder / "openssl.cnf"
    config.write_text(_CONFIG.format(name=f"splitserve {name}", hosts=alt_names))
    key, certificate = folder / f"{name}-key.pem", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256"]
    command += ["-config", str(config), "-extensions", "ca" if is_authority else "leaf", "-days", str(days)]
    command += ["-keyout", str(key), "-out", str(certificate)]
    if not is_authority:
        command += ["-CA", str(folder / f"{AUTHORITY}.pem"), "-CAkey", str(folder / f"{AUTHORITY}-key.pem")]
    # 0o077: only their owner can read the files.
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, umask=0o077, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"openssl could not create {certificate.name} ({reason[0]}): it must be version 3 or later")
    certificate.chmod(0o644)


def _alt_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host.strip('[]'))}"
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host):
        raise OptionError("--host", f"{host!r}: give a host name or an IP address, without a port")
    return f"DNS:{host}"
