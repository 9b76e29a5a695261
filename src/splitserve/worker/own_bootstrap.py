"""Bootstrap server of a prefill worker, which stays when the worker switches to another role.

It notifies decode workers that know the prefill worker when it stops being one. When it becomes one again, the server
has the same address.
"""

from __future__ import annotations

import asyncio

import msgspec

from splitserve.api.http_server import cannot_listen, reachable_host
from splitserve.core.config import DisaggregationConfig
from splitserve.core.request import DisaggregationMode
from splitserve.process.cluster_token import settle_host
from splitserve.transfer.bootstrap import KVBootstrapServer


class OwnBootstrap:
    """Bootstrap server of this worker. Close it when the worker ends."""

    def __init__(self, config: DisaggregationConfig) -> None:
        self._config = config
        self._server: KVBootstrapServer | None = None
        self._is_retired = False

    @property
    def port(self) -> int | None:
        """Return its port. None: the worker is no prefill worker."""
        return None if self._server is None or self._is_retired else self._server.port

    async def open(self, port: int | None) -> str:
        """Start the server, or resume it, and return its URL. `port` None: the one it had, or any free one.

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
        """Answer lookups with 410, because the worker is no longer a prefill worker."""
        self._is_retired = True
        if self._server is not None:
            self._server.retire()

    def close(self) -> None:
        """Stop the server. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
