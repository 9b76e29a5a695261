"""Web page of the router: `index.html` at / and its files at /ui/NAME.

The files hold no data, so they need no API key. The page sends the key with each request for data. It loads nothing
from other servers, and its policy (`Content-Security-Policy`) forbids that, inline scripts, and HTML built from text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/ui/"
_INDEX = "index.html"
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
# `no-cache`: a browser may store a file, but checks for changes before each use. So no page mixes two releases.
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """Content of one file of the page."""

    body: bytes
    media_type: str
    etag: str


class PageApp:
    """ASGI middleware that serves the page, and passes all other requests to `app`.

    GET / is the page only for clients that accept text/html. Other clients receive the index of `app`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = _read_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._answer(scope) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        await (response or self._app)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the response of the page. None: the request is for `app`."""
        path, headers = scope["path"], Headers(scope=scope)
        if path.startswith(PREFIX):
            file = self._files.get(path.removeprefix(PREFIX))
        elif path == "/" and "text/html" in headers.get("accept", ""):
            file = self._files[_INDEX]
        else:
            return None
        if file is None:
            return Response("The page has no such file.\n", 404, _HEADERS, media_type="text/plain")
        fields = {**_HEADERS, "ETag": file.etag, "Vary": "Accept"}
        if file.etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=fields)
        return Response(file.body, headers=fields, media_type=file.media_type)


def _read_files() -> dict[str, PageFile]:
    """Return the files of the page by name."""
    found = {}
    for entry in files("splitserve.router").joinpath("ui").iterdir():
        body, suffix = entry.read_bytes(), PurePath(entry.name).suffix
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        found[entry.name] = PageFile(body, _MEDIA_TYPES.get(suffix, "text/plain"), etag)
    return found
