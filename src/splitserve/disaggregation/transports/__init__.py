"""The ways bytes travel between two pools. `TransferBackend` names them; each loads only when it is chosen."""

from __future__ import annotations

import enum

from splitserve.disaggregation.transports.base import ProgressCallback, Transport, ignore_progress
from splitserve.errors import ConfigError


class TransferBackend(enum.StrEnum):
    # Both ends in this process: tests and simulations.
    FAKE = "fake"
    # Plain sockets: works everywhere.
    TCP = "tcp"


# What workers can be started with: the fake one reaches nobody outside its process.
USER_BACKENDS = tuple(backend.value for backend in TransferBackend if backend is not TransferBackend.FAKE)


def create_transport(backend: str, *, host: str, on_progress: ProgressCallback = ignore_progress) -> Transport:
    """The transport named `backend`, reached by peers on `host`. Raises ConfigError for an unknown name."""
    match backend:
        case TransferBackend.FAKE:
            from splitserve.disaggregation.transports.fake import FakeTransport

            return FakeTransport(on_progress=on_progress)
        case TransferBackend.TCP:
            from splitserve.disaggregation.transports.tcp import TcpTransport

            return TcpTransport(host, on_progress=on_progress)
        case _:
            known = ", ".join(TransferBackend)
            raise ConfigError(f"unknown transfer backend {backend!r}: choose one of {known}")
