"""Two ends of a transport for measurements, the second in a process of its own. The tests extend both classes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np

from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.tools.bench.second_process import SecondProcess
from splitserve.transfer.transports import create_transport, needs_shareable_memory
from splitserve.transfer.transports.base import PeerAddress, Ticket, Transport, TransportOptions, WriteStatus

# Seconds to wait for the end of a write.
WRITE_TIMEOUT = 60.0
# Backends that need memory on a GPU.
_ON_GPU = frozenset({"cuda_ipc", "nccl"})


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


def obey(end: End, command: dict[str, Any], send: Callable[[Any], None]) -> Any:
    """Run one command in the peer's process and return its answer. `send`: sends an answer before the end."""
    match command:
        case {"what": "open"}:
            return end.transport.open_session()
        case {"what": "set", "region": region, "value": value}:
            end.memory[region][:] = value
            return None
        case {"what": "cpu_seconds"}:
            return time.process_time()
    raise ValueError(f"unknown command {command}")


class PeerProcess(SecondProcess):
    """`End` in a process of its own that runs commands. Tests have ends and commands of their own."""

    END: ClassVar[type[End]] = End
    OBEY: ClassVar[Callable[..., Any]] = obey

    def __init__(self, backend: str, lengths: Sequence[int], **options: Any) -> None:
        super().__init__(_run_peer, self.END, type(self).OBEY, backend, lengths, options)

    def __exit__(self, *error: object) -> None:
        # It may have been stopped, and would not end by itself.
        self.kill()

    def ask(self, what: str, **more: Any) -> Any:
        """Send one command and return its answer. Raises SecondProcessError if the process has ended."""
        self.send({"what": what, **more})
        return self.receive()

    def open_session(self) -> PeerAddress:
        address: PeerAddress = self.ask("open")
        return address


def _run_peer(
    connection: Connection,
    end_type: type[End],
    run_command: Callable[..., Any],
    backend: str,
    lengths: Sequence[int],
    options: dict[str, Any],
) -> None:
    """Run commands until the connection is closed."""
    end = end_type(backend, lengths, **options)
    try:
        while True:
            connection.send(run_command(end, connection.recv(), connection.send))
    except (EOFError, ConnectionError):
        return
    finally:
        end.close()
