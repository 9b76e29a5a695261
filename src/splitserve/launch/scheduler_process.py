"""The scheduler's process: `python -m splitserve.launch.scheduler_process`, started by a worker's front end.

1. One line of JSON on standard input says everything (`SchedulerStart`).
2. The model is loaded, the scheduler assembled, and SchedulerReady sent; SchedulerFailed instead where that fails.
3. The loop runs until standard input ends: the front end has closed it, or is gone. A scheduler never outlives it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import ExitStack

import msgspec
import torch

from splitserve.config import CacheConfig, ModelConfig
from splitserve.disaggregation.transports import needs_shareable_pool
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.loader import parse_cpus
from splitserve.errors import SplitserveError
from splitserve.events.publisher import EventPublisher, EventPublisherFactory
from splitserve.launch.assembly import assemble_scheduler
from splitserve.launch.interpreter import set_up_interpreter
from splitserve.launch.local import num_cores
from splitserve.launch.logs import setup_logger
from splitserve.launch.scheduler_link import SchedulerStart
from splitserve.messages import SchedulerFailed, SchedulerReady
from splitserve.scheduler.inbox import FrontEndPipe

logger = logging.getLogger(__name__)

# Seconds a step in progress gets to end before the process is ended from outside the loop.
GRACE = 5.0


def main() -> int:
    # Ctrl-C goes to the whole process group; ending in order is the front end's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=SchedulerStart)
    setup_logger(start.config.server.log_level)
    pipe = FrontEndPipe(start.to_scheduler, start.from_scheduler)
    stopping = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(stopping, pipe), daemon=True).start()
    with ExitStack() as closing:
        closing.callback(pipe.close)
        try:
            # First: a port that is taken shows before the model is loaded.
            publisher = EventPublisherFactory.create(start.config.kv_events, start.dp_rank)
            closing.callback(publisher.shutdown)
            model, cache = share_of_rank(start)
            engine = build_engine(
                model,
                cache,
                draft_model=start.config.speculative.draft_model,
                # Also where its role hands nothing over yet.
                shareable_pool=needs_shareable_pool(start.config.disaggregation.transfer_backend),
            )
            closing.callback(engine.close)
            loop = assemble_scheduler(
                start.config, engine, pipe, start.bootstrap_url, closing, publisher, dp_rank=start.dp_rank
            )
        except SplitserveError as error:
            pipe.send(SchedulerFailed(message=error.message))
            return 1
        except Exception as error:
            logger.exception("the scheduler could not start")
            pipe.send(SchedulerFailed(message=f"{type(error).__name__}: {error}"))
            return 1
        closing.enter_context(set_up_interpreter())
        pipe.send(_ready(engine, publisher))
        loop.run(stopping.is_set)
    return 0


def share_of_rank(start: SchedulerStart) -> tuple[ModelConfig, CacheConfig]:
    """What one data parallel rank gets of the machine: cores and free memory are divided, GPUs dealt out in turn."""
    config = start.config
    model = msgspec.structs.replace(config.model, model=start.model_folder)
    if config.dp_size == 1:
        return model, config.cache
    cores = len(parse_cpus(model.cpu_affinity)) if model.cpu_affinity else num_cores()
    device, num_sharers = model.device, config.dp_size
    if device in ("auto", "cuda") and torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        device, num_sharers = f"cuda:{start.dp_rank % num_gpus}", -(-config.dp_size // num_gpus)
    return (
        msgspec.structs.replace(model, threads=model.threads or max(1, cores // config.dp_size), device=device),
        msgspec.structs.replace(config.cache, num_sharers=num_sharers),
    )


def _await_end_of_input(stopping: threading.Event, pipe: FrontEndPipe) -> None:
    # Not through sys.stdin: its lock, held by a blocked daemon thread, would abort the interpreter's exit.
    while os.read(0, 4096):
        pass
    stopping.set()
    pipe.waker.wake()
    # The main thread may sit in a long step, or in a load: nobody waits for its result any more.
    threading.Event().wait(GRACE)
    os._exit(1)


def _ready(engine: BuiltEngine, publisher: EventPublisher) -> SchedulerReady:
    return SchedulerReady(
        max_total_tokens_per_request=engine.max_total_tokens_per_request,
        vocab_size=engine.loaded.vocab_size,
        pages_total=engine.num_pages,
        page_size=engine.layout.page_size,
        dtype=engine.loaded.dtype_name,
        kv_bytes_per_token=engine.layout.bytes_per_token,
        device=str(engine.loaded.device),
        num_parameters=engine.loaded.num_parameters,
        load_seconds=engine.loaded.load_seconds,
        kv_events_endpoints=[publisher.endpoint],
        kv_replay_endpoints=[publisher.replay_endpoint],
    )


if __name__ == "__main__":
    sys.exit(main())
