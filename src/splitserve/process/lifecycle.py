"""Life of a serving process: it writes a ready file when it serves, drains at a signal, and stops.

The ready file is a small JSON object, which the process that started it awaits (`process/child.py`). The first SIGTERM
or SIGINT drains, the second stops at once. The end of the process that started it also stops it at once: of its
standard input with `exit_with_parent`, or of the Python process that called `launch_server` in a child.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splitserve.core.errors import ClusterError, OptionError
from splitserve.process.process_end import END_REASONS, exit_code_of, is_starter_watched, watch_starter

if TYPE_CHECKING:
    from splitserve.api.http_server import HttpServer

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds from the end of standard input until a process that does not stop is ended by force.
_STOP_GRACE = 60.0


class ReadyInfo(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    port: int
    # URL at which processes of this machine reach it.
    url: str
    # The fields below are for workers only.
    scheduler_pids: tuple[int, ...] = ()
    # Ranks beside the schedulers, if a model is sharded.
    follower_pids: tuple[int, ...] = ()
    bootstrap_port: int | None = None
    disaggregation_mode: str | None = None
    # Name under which clients request the model.
    model: str | None = None
    dtype: str | None = None
    # How the weights in memory are quantized. None: they are floats.
    quantization: str | None = None
    device: str | None = None
    # Size of the KV pools of all data parallel ranks together.
    kv_pool_tokens: int | None = None
    kv_pool_bytes: int | None = None


def ready_path(text: str, flag: str) -> Path:
    """Return the path of a ready file. Raises OptionError if it cannot be written."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(flag, f"{path}: give the name of a file in a folder that exists and can be written to")
    return path


def write_ready_file(path: Path, info: ReadyInfo) -> None:
    """Write the file atomically: readers find no file or a complete one. Raises ClusterError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(msgspec.json.encode(info))
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ClusterError(f"--ready-file {path} cannot be written: {error.strerror}") from error


def read_ready_file(path: Path) -> ReadyInfo | None:
    """Return the content of the file. None: it does not exist yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReadyInfo)
    except FileNotFoundError:
        return None


class Lifecycle:
    def __init__(self) -> None:
        # Set to finish the running requests, accept no new ones, and then end.
        self.draining = asyncio.Event()
        # Set to end now. Implies `draining`.
        self.stopping = asyncio.Event()
        # The first signal. None: there was none.
        self._signal: signal.Signals | None = None

    def request_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._signal is not None:
            self.stop()
            return
        self._signal = number
        self.draining.set()

    def stop(self) -> None:
        self.draining.set()
        self.stopping.set()

    def exit_code(self, *, has_served: bool) -> int:
        """Return the exit code of an orderly end: 130 after SIGINT, 0 after SIGTERM, 143 if it never served."""
        if self._signal is signal.SIGINT or (self._signal is not None and not has_served):
            return exit_code_of(self._signal)
        return 0

    def end_line(self, what: str, *, has_served: bool) -> str:
        """Return the last line of output. `what`: which processes have ended."""
        reason = "stopped" if has_served or self._signal is None else END_REASONS[self._signal]
        return f"{reason}: {what} has ended"

    @contextmanager
    def watch(self, *, exit_with_parent: bool) -> Iterator[None]:
        """Handle signals, and the end of the process that started this one, inside a running event loop."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request_end, number)
        if exit_with_parent or is_starter_watched():
            watch_starter(lambda: loop.call_soon_threadsafe(self._stop_without_starter), _STOP_GRACE)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                # None: a handler that was not installed from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _stop_without_starter(self) -> None:
        logger.warning("the process that started this one has ended, or closed standard input: stopping")
        self.stop()


def drain_line(num_running: int | None, timeout: float) -> str:
    """Return a progress line of a drain. `num_running`: requests. None: unknown. `timeout`: seconds for the drain."""
    if num_running == 0:
        return "draining: no requests are running"
    requests = (
        "running requests" if num_running is None else f"{num_running} request{'s' if num_running > 1 else ''} running"
    )
    return f"draining: {requests}, at most {timeout:g} s; Ctrl-C or SIGTERM again stops at once"


def request_hint(url: str, model: str, *, has_keys: bool) -> tuple[str, str]:
    """Return the lines that name the URL of a ready server, and a request to try."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "temperature": 0, "messages": [question]}
    header = ["-H", "Authorization: Bearer KEY"] if has_keys else []
    call = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", *header]
    return f"ready at {url} (OpenAI API at {url}/v1)", shlex.join([*call, "-d", json.dumps(body)])


async def end_server(server: HttpServer, lifecycle: Lifecycle, deadline: float) -> None:
    """Let running requests finish for `deadline` seconds, or until the process has to stop at once."""
    logger.info(drain_line(server.num_requests, deadline))
    stop = asyncio.create_task(server.stop(deadline))
    stopping = asyncio.create_task(lifecycle.stopping.wait())
    await asyncio.wait({stop, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        await server.abort()
    stopping.cancel()
    await asyncio.gather(stop, stopping, return_exceptions=True)
