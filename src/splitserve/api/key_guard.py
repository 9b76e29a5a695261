"""Authentication by API keys in front of the routes of a router, or of a worker that has keys.

A path is open, for clients, or for operators; unclassified paths are for operators. A client sends a client's key. An
operator sends an operator's key, which is valid on the clients' paths too. If only clients have keys, these are valid
on all paths; if only operators have keys, the clients' paths need none.

The guard passes on the caller's name (`caller_of`), never the key.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.api.api_keys import ApiKeys
from splitserve.api.error_response import error_response
from splitserve.core.errors import ForbiddenError, InvalidKeyError, SplitserveError

logger = logging.getLogger(__name__)


class KeyGuard:
    """ASGI middleware. `clients`, `operators`: their keys. None: they need no key.

    `client_prefix`: paths that begin with it are for clients, like `client_paths`. None: no such paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clients: ApiKeys | None,
        operators: ApiKeys | None,
        open_paths: Collection[str],
        client_paths: Collection[str],
        client_prefix: str | None = None,
    ) -> None:
        self._app = app
        self._clients = clients
        self._operators = operators
        self._open_paths = frozenset(open_paths)
        self._client_paths = frozenset(client_paths)
        self._client_prefix = client_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                caller = self._admit(scope["path"], Headers(scope=scope).get("authorization", ""))
            except SplitserveError as error:
                address = scope["client"][0] if scope.get("client") else "-"
                logger.warning("caller refused path=%r status=%d from=%s", scope["path"], error.http_status, address)
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _admit(self, path: str, authorization: str) -> str | None:
        """Return the caller's name. None: no key is needed. Raises InvalidKeyError and ForbiddenError."""
        has_prefix = self._client_prefix is not None and path.startswith(self._client_prefix)
        is_for_clients = has_prefix or path in self._client_paths
        if is_for_clients and self._clients is None:
            return None
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKeyError("no API key: send the header 'Authorization: Bearer KEY'")
        operator = self._operators.holder_of(key.strip()) if self._operators is not None else None
        client = self._clients.holder_of(key.strip()) if self._clients is not None else None
        if operator is None and client is None:
            raise InvalidKeyError("this API key is unknown: see the file that --api-key-file names")
        if operator is None and not is_for_clients and self._operators is not None:
            raise ForbiddenError(f"{path} is for operators: send a key of the router's --operator-key-file")
        return operator or client


def caller_of(scope: Scope) -> str | None:
    """Return the name of the key's holder. None: no key was needed."""
    caller = scope.get("state", {}).get("caller")
    return caller if isinstance(caller, str) else None
