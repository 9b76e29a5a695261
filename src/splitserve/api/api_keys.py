"""API keys, the names of their holders, and authentication in front of the routes of a router or a worker.

A file holds one key per line and, after white space, the name of its holder. Empty lines and lines that begin with #
are ignored. A name may have several keys, so that a key can be replaced while both are valid.

A path is open, for clients, or for operators; unclassified paths are for operators. A client sends a client's key. An
operator sends an operator's key, which is valid on the clients' paths too. If only clients have keys, these are valid
on all paths; if only operators have keys, the clients' paths need none. The guard passes on the caller's name
(`caller_of`), never the key.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.api.responses import error_response
from splitserve.core.errors import ForbiddenError, InvalidKeyError, OptionError, SplitserveError

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
# Characters that an Authorization header can carry.
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_OTHERS_MAY_READ = 0o044


class ApiKeys:
    """API keys with their holders. `holders`: name by key. Stores only digests of the keys."""

    def __init__(self, holders: Mapping[str, str]) -> None:
        self._salt = secrets.token_bytes(32)
        self._holders = {self._digest(key): name for key, name in holders.items()}

    def holder_of(self, key: str) -> str | None:
        """Return the name of the key's holder. None: the key is unknown.

        The duration of the look-up reveals nothing of the keys: the digests are salted, so no caller can compute the
        digest of a guessed key.
        """
        return self._holders.get(self._digest(key))

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=32).digest()


def read_keys(path: Path, option: str) -> dict[str, str]:
    """Return the names by key, in the file's order. Raises ConfigError.

    A key without a name is named after its line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(option, f"{path}: {reason}; write one key a line, e.g. from: openssl rand -hex 32") from None
    holders: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if problem := _problem(words, holders):
            raise OptionError(option, f"{path}, line {number}: {problem}")
        holders[words[0]] = words[1] if len(words) > 1 else f"line-{number}"
    if not holders:
        raise OptionError(option, f"{path}: no key in it; write one a line, e.g. from: openssl rand -hex 32")
    if mode & _OTHERS_MAY_READ:
        _warn_of_others(path)
    return holders


@functools.cache
def _warn_of_others(path: Path) -> None:
    """Warn that other users may read the file: once per file, even if it is read again."""
    logger.warning("others on this machine may read the keys: chmod 600 %s", path)


def first_key(path: Path, option: str) -> str:
    """Return the key to authenticate with at other processes. Raises ConfigError."""
    return next(iter(read_keys(path, option)))


def key_header(key: str | None) -> dict[str, str]:
    """Return the header that carries the key. Empty: no key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def key_problem(key: str) -> str | None:
    """Return the rule that a key breaks, without the key. None: the key is valid."""
    if len(key) < MIN_KEY_CHARS or not _KEY.fullmatch(key):
        return f"a key has at least {MIN_KEY_CHARS} characters, letters, digits and ._~+/=- (openssl rand -hex 32)"
    return None


def _problem(words: list[str], known: Mapping[str, str]) -> str | None:
    """Return the problem of a line, or None. The key itself is never part of it."""
    key, *names = words
    if problem := key_problem(key):
        return problem
    if len(names) > 1 or (names and not _NAME.fullmatch(names[0])):
        return "after the key comes one name of its holder, of letters, digits and ._@-, or nothing"
    return "this key has come before" if key in known else None


class KeyGuard:
    """ASGI middleware. `clients`, `operators`: their keys. None: they need no key.

    `client_prefixes`: paths that begin with one of these are for clients, like `client_paths`. `on_reject`: called with
    the code of the error of a rejected request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clients: ApiKeys | None,
        operators: ApiKeys | None,
        open_paths: Collection[str],
        client_paths: Collection[str],
        client_prefixes: tuple[str, ...] = (),
        on_reject: Callable[[str], None] | None = None,
    ) -> None:
        self._app = app
        self._clients = clients
        self._operators = operators
        self._open_paths = frozenset(open_paths)
        self._client_paths = frozenset(client_paths)
        self._client_prefixes = client_prefixes
        self._on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                caller, operates = self._admit(scope["path"], Headers(scope=scope).get("authorization", ""))
            except SplitserveError as error:
                address = scope["client"][0] if scope.get("client") else "-"
                if self._on_reject is not None:
                    self._on_reject(error.reason)
                logger.warning("caller refused path=%r status=%d from=%s", scope["path"], error.http_status, address)
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {}).update(caller=caller, is_operator=operates)
        await self._app(scope, receive, send)

    def _admit(self, path: str, authorization: str) -> tuple[str | None, bool]:
        """Return the caller's name, and whether it has the rights of operators. Name None: no key is needed.

        Raises InvalidKeyError and ForbiddenError.
        """
        is_for_clients = path.startswith(self._client_prefixes) or path in self._client_paths
        if is_for_clients and self._clients is None:
            return None, False
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKeyError("no API key: send the header 'Authorization: Bearer KEY'")
        operator = self._operators.holder_of(key.strip()) if self._operators is not None else None
        client = self._clients.holder_of(key.strip()) if self._clients is not None else None
        if operator is None and client is None:
            raise InvalidKeyError("this API key is unknown: see the file that --api-key-file names")
        if operator is None and not is_for_clients and self._operators is not None:
            raise ForbiddenError(
                f"{path} is no route for clients (GET /docs lists all routes): if it is one for operators, send a key "
                "of the router's --operator-key-file"
            )
        return operator or client, operator is not None or self._operators is None


def is_operator(scope: Scope) -> bool:
    """Return whether the caller may read data of all clients: an operator, or any caller if no key is needed."""
    return bool(scope.get("state", {}).get("is_operator", True))


def caller_of(scope: Scope) -> str | None:
    """Return the name of the key's holder. None: no key was needed."""
    caller = scope.get("state", {}).get("caller")
    return caller if isinstance(caller, str) else None
