"""Two ends of a transport for measurements, the second in a process of its own.

`PeerProcess` starts `python -m MODULE SPEC`. That process opens an `End` and runs one JSON command per line: `open`,
`set`, `cpu_seconds`. It answers each with one JSON line. The tests extend both classes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.transports import create_transport, needs_shareable_memory
from splitserve.transfer.transports.base import PeerAddress, Ticket, Transport, TransportOptions, WriteStatus

# Seconds to wait for the end of a write.
WRITE_TIMEOUT = 60.0
# Backends that need memory on a GPU.
_ON_GPU = frozenset({"cuda_ipc", "nccl"})
_ANSWER = "ANSWER "


class End:
    """Transport over its own memory, with one region of each of `lengths` bytes."""

    def __init__(self, backend: str, lengths: Sequence[int], *, device: str = "cuda", **options: Any) -> None:
        """Open the transport. `device`: where memory is allocated that must be on a GPU."""
        self.backend = backend
        self.progress = threading.Event()
        # One array of bytes per region; a tensor if it is on a GPU.
        self.memory: list[Any] = []
        self.transport, regions = self._open(
            lengths, device, TransportOptions(on_progress=self.progress.set, **options)
        )
        self.transport.register(regions)

    def _open(self, lengths: Sequence[int], device: str, options: TransportOptions) -> tuple[Transport, list[Region]]:
        """Fill `memory`, and return the transport and the regions of that memory."""
        if self.backend in _ON_GPU:
            self.memory = [_bytes_on_gpu(length, device) for length in lengths]
            regions = [Region(tensor.data_ptr(), tensor.numel()) for tensor in self.memory]
        else:
            regions = self._allocate(lengths, is_shareable=needs_shareable_memory(self.backend))
        return create_transport(self.backend, options), regions

    def _allocate(self, lengths: Sequence[int], *, is_shareable: bool) -> list[Region]:
        self._arenas = [Arena(length, shareable=is_shareable) for length in lengths]
        self.memory = [np.frombuffer(arena.buffer, dtype=np.uint8) for arena in self._arenas]
        return [arena.region() for arena in self._arenas]

    def outcome(self, ticket: Ticket, timeout: float = WRITE_TIMEOUT) -> WriteStatus:
        """Return the ticket's final status. Raises AssertionError if the write does not end in time."""
        end = time.monotonic() + timeout
        while not (status := self.transport.poll(ticket)).is_final:
            if not self.progress.wait(end - time.monotonic()):
                raise AssertionError("the write did not end")
            self.progress.clear()
        return status

    def close(self) -> None:
        self.transport.close()


def _bytes_on_gpu(num_bytes: int, device: str) -> Any:
    # Imported late: most peers do not need torch.
    import torch

    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return memory


class PeerProcess:
    """`End` in a process of its own. Use as a context manager."""

    MODULE: ClassVar[str] = "splitserve.tools.bench.transfer_peer"

    def __init__(self, backend: str, lengths: Sequence[int], **options: Any) -> None:
        spec = json.dumps({"backend": backend, "lengths": list(lengths), "options": options})
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.MODULE, spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()

    def ask(self, what: str, **more: Any) -> Any:
        """Send one command and return its answer. Raises AssertionError if the process has ended."""
        self.tell(what, **more)
        return self.answer()

    def tell(self, what: str, **more: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            # Libraries write to standard output, too.
            if line.startswith(_ANSWER):
                return json.loads(line[len(_ANSWER) :])
        raise AssertionError(f"the peer process ended with code {self._process.wait(10)}")

    def open_session(self) -> PeerAddress:
        return PeerAddress(*self.ask("open"))

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended. Idempotent."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def obey(end: End, command: dict[str, Any]) -> Any:
    """Run one command in the peer's process and return its answer."""
    match command:
        case {"what": "open"}:
            peer = end.transport.open_session()
            return [peer.session_id, peer.endpoint]
        case {"what": "set", "region": region, "value": value}:
            end.memory[region][:] = value
            return None
        case {"what": "cpu_seconds"}:
            return time.process_time()
    raise ValueError(f"unknown command {command}")


def send_answer(answer: Any) -> None:
    sys.stdout.write(_ANSWER + json.dumps(answer) + "\n")
    sys.stdout.flush()


def run_peer(spec: str, open_end: Callable[..., End], run_command: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Open the end that `spec` describes, and run the commands on standard input until it is closed."""
    read = json.loads(spec)
    options = read["options"]
    if "token" in options:
        options["token"] = options["token"].encode()
    end = open_end(read["backend"], read["lengths"], **options)
    try:
        for line in sys.stdin:
            send_answer(run_command(end, json.loads(line)))
    finally:
        end.close()


if __name__ == "__main__":
    run_peer(sys.argv[1], End, obey)
