"""Small router without workers that serves the web page and generated data in the router's shapes.

Tests change its workers and requests, and `publish` sends the next event of GET /v1/live. `python -m
support.fake_router` serves it with moving data, to work on the page.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from splitserve.api.api_keys import ApiKeys, KeyGuard
from splitserve.api.http_server import HttpServer, bind, port_of
from splitserve.core.limits import LimitsConfig
from splitserve.router.page import PageApp
from support.fake_traces import Json, report_of, summary_of

ANSWER = "The prefill worker computes the prompt and the decode worker writes one token after the other. "
WORDS = ANSWER.split(" ")


def worker_of(role: str, number: int, **changes: Any) -> Json:
    queues = dict.fromkeys(("grammar", "bootstrap", "inflight", "prealloc", "transfer"), 0)
    figures = {"kv_usage": 0.4, "kv_tokens_total": 65536, "step_ms": 21.5, "tokens_per_s": 480.0}
    url = f"http://10.0.0.{number}:8000"
    shown = {"url": url, "name": f"{role}-{number}", "role": role, "state": "ready", "reason": ""}
    counts = {"running": 4, "waiting": 1, "retracted": 0, "queues": queues}
    return {**shown, **counts, **figures, "prefix_hit_rate": 0.62, "transfer_gb_s": 1.8, **changes}


def default_workers() -> list[Json]:
    return [worker_of(role, number) for number, role in enumerate(("prefill", "prefill", "decode", "decode"), 1)]


@dataclass
class FakeRouter:
    workers: list[Json] = field(default_factory=default_workers)
    requests: dict[str, Json] = field(default_factory=dict)
    can_operate: bool = True
    # Key that all data needs. None: no key.
    key: str | None = None
    # Chat: tokens per answer, and tokens after which the stream waits until the client closes it. None: it does not.
    num_tokens: int = 24
    stops_after: int | None = None
    tokens_per_second: float | None = None
    # Path and body of each order, and bodies of chat requests.
    orders: list[tuple[str, Json]] = field(default_factory=list)
    chats: list[Json] = field(default_factory=list)
    seconds_of_charts: int = 600
    # Seconds before the end of the charts -> TTFT in them. Other seconds have none. Empty: all have one.
    ttft_values: dict[int, float] = field(default_factory=dict)
    # Workers that every trace lists as missing.
    silent_workers: list[str] = field(default_factory=list)
    url: str = ""
    _listeners: set[asyncio.Queue[Json | None]] = field(default_factory=set)

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def add_requests(self, count: int, **changes: Any) -> list[Json]:
        start, now = len(self.requests), time.time()
        pairs = list(itertools.product(self._urls("prefill"), self._urls("decode")))
        new = [
            summary_of(i, pairs[i % len(pairs)], now - (start + count - i) / 10, **changes)
            for i in range(start, start + count)
        ]
        self.requests.update((summary["rid"], summary) for summary in new)
        return new

    def publish(self, requests: Iterable[Json] = (), events: Iterable[Json] = ()) -> None:
        """Send an event to all open pages."""
        changed = list(requests)
        self.requests.update((summary["rid"], summary) for summary in changed)
        event = self._event(changed, [{"at": time.time(), "worker": "", "rid": "", **event} for event in events])
        for queue in self._listeners:
            queue.put_nowait(event)

    def end_streams(self) -> None:
        """End GET /v1/live of all open pages."""
        for queue in self._listeners:
            queue.put_nowait(None)

    def _urls(self, role: str) -> list[str]:
        return [worker["url"] for worker in self.workers if worker["role"] == role]

    def _event(self, requests: list[Json], events: list[Json]) -> Json:
        running = sum(summary["state"] == "running" for summary in self.requests.values())
        rates = {"running": running, "waiting": 3, "queued": 2, "requests_per_s": 12.5, "tokens_per_s": 2000.0}
        times = {"ttft_p50_ms": 182.0, "itl_p50_ms": 21.4, "itl_p99_ms": 48.9, "loop_lag_ms": 0.4}
        pairs = itertools.product(self._urls("prefill"), self._urls("decode"))
        links = [{"prefill": p, "decode": d, "requests": 2, "bytes_per_s": 2.1e8} for p, d in pairs]
        about = {"now": time.time(), "version": "0", "model": "fake", "can_operate": self.can_operate}
        state = {"router": {**rates, **times}, "workers": self.workers, "links": links}
        return {**about, **state, "requests": requests, "events": events}

    async def _live(self, _: Request) -> Response:
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        queue.put_nowait(self._event(list(self.requests.values()), []))
        self._listeners.add(queue)

        async def frames() -> AsyncIterator[str]:
            try:
                while (event := await queue.get()) is not None:
                    yield f"data: {json.dumps(event)}\n\n"
            finally:
                self._listeners.discard(queue)

        return StreamingResponse(frames(), media_type="text/event-stream")

    async def _charts(self, request: Request) -> Response:
        end = int(time.time())
        since = int(float(request.query_params.get("since", end - self.seconds_of_charts)))
        times = list(range(max(since + 1, end - self.seconds_of_charts), end + 1))
        series = {"ttft_p50_ms": 180.0, "itl_p50_ms": 21.0, "itl_p99_ms": 48.0, "tokens_per_s": 2000.0, "running": 40.0}
        series |= {"requests_per_s": 12.0, "waiting": 4.0, "prefix_hit_rate": 0.6, "transfer_gb_s": 1.9}
        series |= {f"kv_usage:{worker['url']}": 0.5 for worker in self.workers}
        series |= {f"queue:{worker['url']}": 3.0 for worker in self.workers}
        waves: dict[str, list[float | None]] = {
            name: [mean * (1 + 0.2 * math.sin((t + 37 * i) / 40)) for t in times]
            for i, (name, mean) in enumerate(series.items())
        }
        if self.ttft_values:
            waves["ttft_p50_ms"] = [self.ttft_values.get(end - t) for t in times]
        return JSONResponse({"interval_s": 1, "time": times, "series": waves})

    async def _traces(self, request: Request) -> Response:
        since = float(request.query_params.get("since", 0))
        return JSONResponse({"traces": [r for r in self.requests.values() if r["started_at"] >= since]})

    async def _trace(self, request: Request) -> Response:
        summary = self.requests.get(request.path_params["rid"])
        if summary is None or summary["state"] == "running":
            return JSONResponse({"error": {"message": "no record of this request"}}, 404)
        return JSONResponse(report_of(summary, self.silent_workers))

    async def _steps(self, request: Request) -> Response:
        since, rids = int(request.query_params["since"]), list(self.requests)[:6]
        steps = [
            {"number": n, "start": n * 0.02, "end": n * 0.02 + 0.02, "kind": "decode", "num_requests": 6, "rids": rids}
            for n in range(since + 1, since + 60)
        ]
        return JSONResponse({"clock": {"monotonic": 0.0, "unix": time.time()}, "steps": steps})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake"}]})

    async def _order(self, request: Request) -> Response:
        body = await request.json()
        self.orders.append((request.url.path, body))
        for worker in self.workers:
            if worker["url"] == body.get("url") and request.url.path == "/workers/drain":
                worker["state"] = "draining"
        self.publish()
        return JSONResponse({"success": True})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.chats.append(body)
        summary = self.add_requests(1, route="/v1/chat/completions", output_tokens=self.num_tokens)[0]
        headers = {"x-request-id": summary["rid"]}
        return StreamingResponse(
            self._answer(bool(body.get("logprobs"))), headers=headers, media_type="text/event-stream"
        )

    async def _answer(self, with_logprobs: bool) -> AsyncIterator[str]:
        started = time.monotonic()
        for i in range(self.num_tokens):
            if i == self.stops_after:
                await asyncio.Event().wait()
            if self.tokens_per_second and (wait := started + i / self.tokens_per_second - time.monotonic()) > 0.005:
                await asyncio.sleep(wait)
            token = WORDS[i % len(WORDS)] + " "
            choice: Json = {"index": 0, "delta": {"content": token}, "finish_reason": None}
            if with_logprobs:
                top = [{"token": word, "logprob": -0.3 * k - 0.1} for k, word in enumerate((token, "a ", "<b>"))]
                choice["logprobs"] = {"content": [{"token": token, "logprob": -(i % 5) * 0.7, "top_logprobs": top}]}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': 'stop'}]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': self.num_tokens}})}\n\n"
        yield "data: [DONE]\n\n"

    def app(self) -> PageApp:
        orders = ("/workers/drain", "/workers/resume", "/role", "/flush_cache")
        reads = {"live": self._live, "charts": self._charts, "traces": self._traces, "steps": self._steps}
        routes = [
            *(Route(f"/v1/{name}", endpoint) for name, endpoint in reads.items()),
            Route("/v1/trace/{rid}", self._trace),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            *(Route(path, self._order, methods=["POST"]) for path in orders),
        ]
        if self.key is None:
            return PageApp(Starlette(routes=routes))
        keys = ApiKeys({self.key: "client"})
        return PageApp(KeyGuard(Starlette(routes=routes), clients=keys, operators=None, open_paths=(), client_paths=()))


@asynccontextmanager
async def start_fake_router(port: int = 0, **fields: Any) -> AsyncIterator[FakeRouter]:
    """Serve a fake router on a free port, or on `port`."""
    fake = FakeRouter(**fields)
    sock = bind("127.0.0.1", port)
    server = HttpServer(fake.app(), sock, limits=LimitsConfig())
    fake.url = f"http://127.0.0.1:{port_of(sock)}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(0.1)


async def keep_moving(fake: FakeRouter, num_running: int = 200) -> None:
    """Publish an event per second: requests finish, others start, and loads change."""
    while True:
        running = [summary for summary in fake.requests.values() if summary["state"] == "running"]
        for summary in running:
            summary["output_tokens"] += 2000 // max(1, len(running))
        finished = running[: num_running // 4]
        for summary in finished:
            summary |= {"state": "done", "e2e_ms": 1000 * (time.time() - summary["started_at"])}
        started = fake.add_requests(
            num_running - len(running) + len(finished), state="running", output_tokens=0, e2e_ms=None
        )
        for worker in fake.workers:
            worker["kv_usage"] = random.uniform(0.3, 0.9)
        fake.publish([*running, *started])
        await asyncio.sleep(1.0)


async def _main() -> None:
    async with start_fake_router(8099, tokens_per_second=2000, num_tokens=400) as fake:
        fake.add_requests(10_000)
        print(fake.url)  # noqa: T201
        await keep_moving(fake)


if __name__ == "__main__":
    asyncio.run(_main())
