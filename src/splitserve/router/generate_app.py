"""Routes that generate, directly on ASGI: they pass requests to the balancer and report disconnected clients.

They precede FastAPI: its routing takes as long as all other work of the router per request.
"""

from __future__ import annotations

import logging

from starlette.types import Receive, Scope, Send

from splitserve.api.error_response import Headers
from splitserve.api.key_guard import caller_of
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.client_stream import ClientStream, serve_client
from splitserve.router.upstream import REQUEST_HEADERS

logger = logging.getLogger(__name__)


class GenerateApp:
    """ASGI application of the routes that generate."""

    def __init__(self, balancer: MiniLoadBalancer) -> None:
        self._balancer = balancer
        # A key that was checked here is not sent to the workers.
        names = [name for name in REQUEST_HEADERS if name != "authorization" or not balancer.args.has_keys]
        self._passed = {name.encode(): name for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await _read_body(receive)
        if raw is None:
            return
        path, caller, headers = scope["path"], caller_of(scope), self._headers_for_workers(scope)
        balancer = self._balancer

        async def serve(client: ClientStream) -> None:
            await balancer.generate(path, raw, headers, client, caller)

        def on_disconnect() -> None:
            logger.info("client left route=%s", path)
            balancer.metrics.disconnects.inc()

        await serve_client(receive, send, serve, on_disconnect)

    def _headers_for_workers(self, scope: Scope) -> Headers:
        passed = self._passed
        return {passed[name]: value.decode("latin-1") for name, value in scope["headers"] if name in passed}


async def _read_body(receive: Receive) -> bytes | None:
    """Return the whole body. None: the client disconnected before its end."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)
