"""Start of a worker: first all checks, then front end and scheduler import their modules in parallel."""

from __future__ import annotations

from contextlib import ExitStack, closing

import msgspec

from splitserve.api.http_server import bind
from splitserve.core.config import WorkerConfig
from splitserve.engine.sources import resolve_model
from splitserve.process.cluster_token import settle_host
from splitserve.process.settings import setup_logger
from splitserve.ranks.launch import LaunchConfig
from splitserve.ranks.node_head import bind_head
from splitserve.ranks.processes import EarlyProcess
from splitserve.worker.preflight import check_preflight
from splitserve.worker.shared_tokenizer import load_tokenizer


def run_worker(config: WorkerConfig, options: LaunchConfig) -> int:
    """Serve until a signal ends it. Return the exit code: 1 if the scheduler failed, else that of the signal.

    Raises ConfigError before anything has started, ModelLoadError.
    """
    config = msgspec.structs.replace(config, disaggregation=settle_host(config.disaggregation))
    setup_logger(config.server.log_level, config.server.log_format)
    with ExitStack() as sockets:
        sock = sockets.enter_context(bind(config.server.host, config.server.port))
        head_socket = sockets.enter_context(bind_head(config)) if config.parallel.nnodes > 1 else None
        folder = resolve_model(config.model.model)
        check_preflight(config, folder)
        with closing(EarlyProcess()) as early:
            # Until the worker handles signals, one ends this process at once, and the end of its standard input ends
            # `early`. During an import a signal must not raise: a callback of the interpreter may lose the exception.
            import uvloop

            from splitserve.worker.worker import ServingWorker

            tokenizer = load_tokenizer(folder)
            # The worker closes the sockets.
            sockets.pop_all()
            return uvloop.run(ServingWorker(config, options, sock, folder, head_socket, early).run(tokenizer))
