"""One function in a process of its own, connected by a pipe: a limit, a baseline, or the second end of a transport.

`End` is a transport over its own memory, and `PeerProcess` one in another process. The tests extend both classes.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, ClassVar, Self

import numpy as np

from splitserve.core.errors import SplitserveError
from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.transports import create_transport, needs_shareable_memory
from splitserve.transfer.transports.base import PeerAddress, Ticket, Transport, TransportOptions, WriteStatus

# Seconds for the process to be ready or to answer, and for its end after its connection is closed.
_TIMEOUT = 120.0
_END_TIMEOUT = 10.0
# Seconds to wait for the end of a write.
WRITE_TIMEOUT = 60.0
# Name of a backend with options, for measurements and tests -> backend, options.
VARIANTS: Mapping[str, tuple[str, dict[str, str]]] = {
    "mooncake-direct": ("mooncake", {"direct": "true"}),
    "tcp-direct": ("tcp", {"direct": "true"}),
}
# Memory of `tcp` is private, so that its writes go through sockets, and that of this variant can be mapped.
_SHAREABLE = frozenset({"tcp-direct"})
# Backends that need memory on a GPU.
_ON_GPU = frozenset({"cuda_ipc", "nccl"})


class SecondProcessError(SplitserveError):
    """The second process ended, or did not answer in time."""

    reason = "second_process"


class SecondProcess:
    """`run(connection, *args)` in another process. Use as a context manager.

    At the end of the block its connection is closed. If it does not end then, it is killed.
    """

    # How processes start.
    CONTEXT: ClassVar[SpawnContext | ForkServerContext] = multiprocessing.get_context("spawn")

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        self.connection, theirs = self.CONTEXT.Pipe()
        self._process = self.CONTEXT.Process(target=run, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self._process.join(_END_TIMEOUT)
        self.kill()

    def send(self, message: Any) -> None:
        """Send a message. Raises SecondProcessError if the process has ended."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def receive(self, timeout: float = _TIMEOUT) -> Any:
        """Return the next message. Raises SecondProcessError if there is none."""
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        raise SecondProcessError(f"the second process did not answer within {timeout:g} s")

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended. Idempotent."""
        self._process.kill()
        self._process.join()

    def _ended(self) -> SecondProcessError:
        self._process.join(_END_TIMEOUT)
        return SecondProcessError(f"the second process ended with code {self._process.exitcode}: see its error above")


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
            # Imported late: most peers do not need torch.
            import torch

            self.memory = [torch.zeros(length, dtype=torch.uint8, device=device) for length in lengths]
            torch.cuda.synchronize()
            regions = [Region(tensor.data_ptr(), tensor.numel()) for tensor in self.memory]
        else:
            is_shareable = needs_shareable_memory(self.backend) or self.backend in _SHAREABLE
            regions = self._allocate(lengths, is_shareable=is_shareable)
        library, extra = VARIANTS.get(self.backend, (self.backend, {}))
        return create_transport(library, replace(options, extra={**options.extra, **extra})), regions

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

    def open_session(self) -> PeerAddress:
        return self.transport.open_session()

    def set(self, region: int, value: int) -> None:
        """Set all bytes of a region."""
        self.memory[region][:] = value

    def cpu_seconds(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self.transport.close()


class PeerProcess(SecondProcess):
    """`End` in a process of its own. Tests have ends with more methods."""

    END: ClassVar[type[End]] = End

    def __init__(self, backend: str, lengths: Sequence[int], **options: Any) -> None:
        super().__init__(_run_peer, self.END, backend, lengths, options)

    def __exit__(self, *error: object) -> None:
        # It may have been stopped, and would not end by itself.
        self.kill()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of its end and return the answer. Raises SecondProcessError if the process has ended."""
        self.send((method, arguments))
        return self.receive()

    def open_session(self) -> PeerAddress:
        address: PeerAddress = self.ask("open_session")
        return address


def _run_peer(
    connection: Connection, end_type: type[End], backend: str, lengths: Sequence[int], options: dict[str, Any]
) -> None:
    """Call methods of the end until the connection is closed."""
    end = end_type(backend, lengths, **options)
    try:
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(end, method)(**arguments))
    except (EOFError, ConnectionError):
        return
    finally:
        end.close()
