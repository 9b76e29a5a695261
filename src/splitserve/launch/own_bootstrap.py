"""A prefill worker's own bootstrap server, which stays when the worker becomes something else.

Decode workers that knew it as a prefill worker are told at once that it is none any more, and when it is one again, it
is at the address they know.
"""

from __future__ import annotations

import asyncio

import msgspec

from splitserve.config import DisaggregationConfig
from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.bootstrap import KVBootstrapServer
from splitserve.launch.cluster_token import settle_host
from splitserve.launch.http_server import cannot_listen, reachable_host


class OwnBootstrap:
    """Close it when the worker ends."""

    def __init__(self, config: DisaggregationConfig) -> None:
        self._config = config
        self._server: KVBootstrapServer | None = None
        self._is_retired = False

    @property
    def port(self) -> int | None:
        """None while the worker is no prefill worker."""
        return None if self._server is None or self._is_retired else self._server.port

    async def open(self, port: int | None) -> str:
        """Start it, or take it up again; its URL. `port` None: the one it had, or any free one.

        Raises ConfigError.
        """
        server = self._server
        host = settle_host(msgspec.structs.replace(self._config, mode=DisaggregationMode.PREFILL)).host
        if server is None or port not in (None, server.port):
            server = KVBootstrapServer(host, port or 0, self._config.cluster_token.secret)
            try:
                await asyncio.to_thread(server.run)
            except OSError as error:
                raise cannot_listen(host, port, error, "--disaggregation-bootstrap-port") from None
            self.close()
            self._server = server
        self._is_retired = False
        return f"http://{reachable_host(host)}:{server.port}"

    def retire(self) -> None:
        """The worker is no prefill worker: say so to whoever asks."""
        self._is_retired = True
        if self._server is not None:
            self._server.retire()

    def close(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
