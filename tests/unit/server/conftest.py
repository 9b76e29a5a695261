from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import DisaggregationConfig, ModelConfig, SchedulerConfig, ServerConfig, WorkerConfig
from splitserve.core.kv_events import KVEventsConfig
from splitserve.core.limits import LimitsConfig
from splitserve.core.request import DisaggregationMode
from splitserve.server.app import build_app
from splitserve.server.front_end import FrontEnd
from splitserve.server.scheduler_client import SchedulerClient
from splitserve.server.scheduler_group import SchedulerGroup

from .server_fakes import EchoScheduler, write_tokenizer_folder

# Seconds a test waits for anything before it fails.
DEADLINE = 60.0


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
async def client() -> AsyncIterator[SchedulerClient]:
    client = SchedulerClient("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def scheduler(client: SchedulerClient) -> AsyncIterator[EchoScheduler]:
    scheduler = EchoScheduler(client.to_scheduler, client.from_scheduler)
    yield scheduler
    await scheduler.close()


@dataclass
class Worker:
    app: FastAPI
    scheduler: EchoScheduler
    http: httpx.AsyncClient

    @property
    def front(self) -> FrontEnd:
        front: FrontEnd = self.app.state.front
        return front


StartWorker = Callable[..., contextlib.AbstractAsyncContextManager[Worker]]


@pytest.fixture
async def start_worker(client: SchedulerClient, scheduler: EchoScheduler, tokenizer: Tokenizer) -> StartWorker:
    @contextlib.asynccontextmanager
    async def start(
        mode: str = "null",
        *,
        max_open: int = 64,
        live: bool = False,
        bootstrap_port: int | None = None,
        kv_events: KVEventsConfig | None = None,
        strict_fields: bool = False,
        limits: LimitsConfig | None = None,
        hidden_states: bool = False,
        backend: str = "tcp",
    ) -> AsyncIterator[Worker]:
        await scheduler.start()
        await client.ready(DEADLINE)
        config = WorkerConfig(
            model=ModelConfig(return_hidden_states=hidden_states),
            scheduler=SchedulerConfig(max_running_requests=1, max_queued_requests=max_open - 1),
            disaggregation=DisaggregationConfig(mode=DisaggregationMode(mode), transfer_backend=backend),
            server=ServerConfig(served_model_name="tiny", strict_fields=strict_fields, limits=limits or LimitsConfig()),
            kv_events=kv_events or KVEventsConfig(),
        )
        app = build_app(
            config=config,
            scheduler=SchedulerGroup([client], is_prefill=mode == "prefill", output_timeout=DEADLINE),
            tokenizer=tokenizer,
            model_path="/models/tiny",
            bootstrap_port=bootstrap_port,
        )
        async with contextlib.AsyncExitStack() as stack:
            if live:
                url = await stack.enter_async_context(serve(app))
                http = httpx.AsyncClient(base_url=url, timeout=DEADLINE)
            else:
                transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
                http = httpx.AsyncClient(transport=transport, base_url="http://worker")
            await stack.enter_async_context(http)
            yield Worker(app, scheduler, http)

    return start


@pytest.fixture
async def worker(start_worker: StartWorker) -> AsyncIterator[Worker]:
    async with start_worker() as worker:
        yield worker


@pytest.fixture
async def live_worker(start_worker: StartWorker) -> AsyncIterator[Worker]:
    """Over a real socket."""
    async with start_worker(live=True) as worker:
        yield worker


@contextlib.asynccontextmanager
async def serve(app: FastAPI) -> AsyncIterator[str]:
    """The app on a free port, in this loop."""
    listening = asyncio.Event()

    class Server(uvicorn.Server):
        async def startup(self, *args: object, **kwargs: object) -> None:
            await super().startup(*args, **kwargs)  # type: ignore[arg-type]
            listening.set()

        @contextlib.contextmanager
        def capture_signals(self):  # type: ignore[no-untyped-def]
            yield

    server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    try:
        await asyncio.wait_for(listening.wait(), DEADLINE)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, DEADLINE)
