"""Registry of prefill ranks, from which decode ranks read: a small HTTP server beside each prefill worker.

  PUT /route                       a rank registers its PrefillInfo; a new epoch replaces the old one
  GET /route?version=5&dp_rank=0   the infos of all ranks of that data parallel rank, in order of their index; 503 until
                                   every rank has registered, 404 for an unknown rank, 410 after the worker changed to
                                   another role
  GET /health                      200

All routes but /health need a proof of the cluster token (`authentication.py`). Without: 401 and a challenge, or 403.
A connection is pending until its first request with a proof. Number and time of these are limited (`pending.py`).
The server stores addresses and layouts. No data of requests passes through it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from splitserve.core.clock import SystemClock
from splitserve.core.parallel import ParallelRank
from splitserve.process.authentication import TOKENS_DIFFER, Challenges, ProofVerdict
from splitserve.process.threads import LoopThread
from splitserve.transfer.pending import PendingHandshakes
from splitserve.transfer.wire import PROTOCOL_VERSION, PrefillInfo, version_difference

logger = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 10.0
# Seconds a connection that has authenticated may be idle.
IDLE_SECONDS = 30.0
BACKLOG = 1024


class _VersionOnly(msgspec.Struct):
    version: int


class RouteTable:
    """Registered ranks of one prefill worker. Pure."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int, int], PrefillInfo] = {}
        # Sizes (tp, pp, dp).
        self._sizes = (0, 0, 0)

    def put(self, info: PrefillInfo) -> None:
        """Register a rank. Raises ValueError if its rank is outside its sizes."""
        rank = info.args.rank
        place, sizes = _place(rank), _sizes(rank)
        if not all(0 <= r < size for r, size in zip(place, sizes, strict=True)):
            raise ValueError(f"rank (tp, pp, dp) {place} is outside its sizes {sizes}")
        if sizes != self._sizes:
            # Another deployment took over: registrations of the previous one are invalid.
            self._ranks.clear()
            self._sizes = sizes
        # Another start of the same deployment must not be mixed with ranks of the previous start.
        for old in [p for p, i in self._ranks.items() if p[2] == place[2] and i.instance != info.instance]:
            del self._ranks[old]
        self._ranks[place] = info

    def clear(self) -> None:
        self._ranks.clear()
        self._sizes = (0, 0, 0)

    def get(self, dp_rank: int) -> list[PrefillInfo] | None:
        """Return the ranks of a data parallel rank, in order of index. None until every rank of the worker registered.

        Raises KeyError for a data parallel rank that this worker does not have.
        """
        if len(self._ranks) < max(1, math.prod(self._sizes)):
            return None
        some = self._ranks[0, 0, dp_rank].args.rank
        return [self._ranks[_place(rank)] for rank in some.group()]


class _HttpServer(web.Server):
    """aiohttp's server, with each connection pending until it has authenticated."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], name: str) -> None:
        super().__init__(handler, access_log=None, keepalive_timeout=IDLE_SECONDS)
        self.pending: PendingHandshakes[web.RequestHandler] = PendingHandshakes(name, SystemClock())
        self._expiry: asyncio.TimerHandle | None = None

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if dropped := self.pending.add(handler, str((transport.get_extra_info("peername") or ("?",))[0])):
            dropped.force_close()
        self._expire()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self.pending.remove(handler)
        super().connection_lost(handler, exc)

    def _expire(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for handler in self.pending.expire():
            handler.force_close()
        left = self.pending.seconds_left()
        self._expiry = None if left is None else asyncio.get_running_loop().call_later(left, self._expire)


class KVBootstrapServer:
    """HTTP server of one RouteTable, in a thread of its own. `port` 0: any free port; `self.port` is the actual one."""

    def __init__(self, host: str, port: int, token: bytes = b"") -> None:
        self.host = host
        self.port = port
        self._challenges = Challenges(token, SystemClock())
        # True from `retire` until a rank registers again.
        self._is_retired = False
        self._table = RouteTable()
        self._thread: LoopThread | None = None
        self._server: _HttpServer | None = None
        self._runner: web.ServerRunner | None = None

    def run(self) -> None:
        """Start serving. Raises OSError if the port is taken."""
        self._thread = LoopThread("kv-bootstrap")
        try:
            self._thread.submit(self._start()).result(START_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    def retire(self) -> None:
        """Answer lookups with 410, until a rank registers again."""
        if self._thread is not None:
            self._thread.submit(self._retire()).result(START_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._runner is not None:
            thread.submit(self._runner.cleanup()).result(START_TIMEOUT_SECONDS)
            self._runner = None
        thread.close()

    async def _start(self) -> None:
        self._server = _HttpServer(self._handle, f"bootstrap server {self.host}")
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, backlog=BACKLOG).start()
        self.port = self._runner.addresses[0][1]

    async def _retire(self) -> None:
        self._table.clear()
        self._is_retired = True

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.json_response({"status": "ok"})
        if request.path != "/route" or request.method not in ("GET", "PUT"):
            return _error(404, f"there is no {request.method} {request.path[:100]} here")
        assert self._server is not None
        match await self._proof_of(request):
            case ProofVerdict.GOOD:
                self._server.pending.remove(request.protocol)
                return await self._put_route(request) if request.method == "PUT" else self._get_route(request)
            case ProofVerdict.MISSING:
                response = _error(401, "this needs a proof of the cluster token")
                response.headers["WWW-Authenticate"] = self._challenges.issue()
                return response
            case ProofVerdict.WRONG:
                self._server.pending.reject(request.protocol, TOKENS_DIFFER)
                response = _error(403, TOKENS_DIFFER)
                response.force_close()
                return response

    async def _proof_of(self, request: web.BaseRequest) -> ProofVerdict:
        authorization = request.headers.get("Authorization", "")
        # Do not read the body of a request without a proof: the proof covers the body.
        if not authorization:
            return ProofVerdict.MISSING
        return self._challenges.check(authorization, request.method, request.raw_path, await request.read())

    async def _put_route(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        try:
            version = msgspec.json.decode(body, type=_VersionOnly).version
            if version != PROTOCOL_VERSION:
                return _error(400, version_difference(ours=PROTOCOL_VERSION, theirs=version))
            info = msgspec.json.decode(body, type=PrefillInfo)
            self._table.put(info)
            self._is_retired = False
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return _error(400, f"malformed registration: {error}")
        logger.info("prefill rank %s registered from %s", _place(info.args.rank), info.control_address)
        return web.json_response({"registered": True})

    def _get_route(self, request: web.BaseRequest) -> web.Response:
        try:
            version, dp_rank = (int(request.query[name]) for name in ("version", "dp_rank"))
        except (KeyError, ValueError):
            return _error(400, "version and dp_rank are needed: run the same Splitserve release on both sides")
        if version != PROTOCOL_VERSION:
            return _error(400, version_difference(ours=PROTOCOL_VERSION, theirs=version))
        if self._is_retired:
            return _error(410, "this worker is no prefill worker any more")
        try:
            infos = self._table.get(dp_rank)
        except KeyError:
            return _error(404, f"this prefill worker has no data parallel rank {dp_rank}")
        if infos is None:
            return _error(503, "not all prefill ranks have registered yet")
        return web.Response(body=msgspec.json.encode(infos), content_type="application/json")


def _place(rank: ParallelRank) -> tuple[int, int, int]:
    return rank.tp_rank, rank.pp_rank, rank.dp_rank


def _sizes(rank: ParallelRank) -> tuple[int, int, int]:
    return rank.tp_size, rank.pp_size, rank.dp_size


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
