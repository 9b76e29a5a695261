"""HTTP app of a worker, built from its parts. `app.state.front` is the FrontEnd, which is drained there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from splitserve import __version__
from splitserve.api.api_keys import ApiKeys, KeyGuard, read_keys
from splitserve.api.intake import Intake, RequestMemory
from splitserve.api.openapi import DOCS_PATHS, describe, new_app
from splitserve.api.responses import install_error_handlers
from splitserve.api.schemas import ROLE_HEADER
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import WorkerConfig
from splitserve.observe.scheduler_metrics import PREFIX
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.server.admin import admin_routes, role_routes
from splitserve.server.front_end import FrontEnd, RequestTable
from splitserve.server.memory_routes import memory_routes
from splitserve.server.native import native_routes
from splitserve.server.openai import openai_routes
from splitserve.server.sample_route import sample_routes
from splitserve.server.scheduler_group import SchedulerGroup

# Monitoring and the documentation need no key.
_OPEN_PATHS = ("/health", "/live", "/metrics", *DOCS_PATHS)


def build_app(
    *,
    config: WorkerConfig,
    scheduler: SchedulerGroup,
    tokenizer: Tokenizer,
    model_path: str,
    bootstrap_port: int | None = None,
    scheduler_pids: tuple[int, ...] = (),
) -> FastAPI:
    """Return the app, which answers 503 until the scheduler is ready.

    `bootstrap_port`: port of the bootstrap server, if it is not the configured one (which may be 0).
    """
    front = FrontEnd(
        config=config,
        scheduler=scheduler,
        tokenizer=tokenizer,
        model_path=model_path,
        bootstrap_port=config.disaggregation.bootstrap_port if bootstrap_port is None else bootstrap_port,
        requests=RequestTable(config.max_open_requests),
        metrics=WorkerMetrics(config.served_model_name, config.server.metrics_compat),
        scheduler_pids=scheduler_pids,
        request_memory=RequestMemory(config.server.limits.max_request_memory),
    )
    front.request_memory.export(front.metrics.registry, PREFIX)
    front.metrics.disaggregation = config.disaggregation

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lag = asyncio.create_task(front.metrics.loop_lag.run())
        try:
            yield
        finally:
            lag.cancel()
            front.prompt_pool.close()

    app = new_app("Splitserve worker", __version__, lifespan=lifespan)
    app.state.front = front
    install_error_handlers(app)
    _add_guards(app, front)
    for routes in (native_routes, openai_routes, admin_routes, role_routes, memory_routes, sample_routes):
        app.include_router(routes(front))
    describe(app)
    return app


def _add_guards(app: FastAPI, front: FrontEnd) -> None:
    """Add the middleware that reads bodies and checks keys."""
    config = front.config
    app.add_middleware(
        Intake,
        max_body_bytes=front.max_body_bytes,
        timeout=config.server.limits.body_timeout,
        memory=front.request_memory,
        router_header=ROLE_HEADER,
        on_reject=front.metrics.count_rejection,
    )
    # Added last, so it runs first: without a key no body is read.
    if config.server.api_key_file is not None:
        keys = ApiKeys(read_keys(Path(config.server.api_key_file), "--api-key-file"))
        app.add_middleware(
            KeyGuard,
            clients=keys,
            operators=None,
            open_paths=_OPEN_PATHS,
            client_paths=(),
            on_reject=front.metrics.count_rejection,
        )
