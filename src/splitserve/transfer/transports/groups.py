"""Groups of two members in torch.distributed, each for the lifetime of one connection between two workers.

1. The receiver sends an authenticated sender its library and a fresh secret (`RendezvousInfo`). Both ends create the
   group at the same time: the library exchanges its keys through a `ConnectionStore` over the data connection, which
   stays open. Then each end sends the other one half of the secret through the group.
2. Tensors are sent and received in order. A receiver's wait ends with the data connection, or at its deadline.
3. `close` is the fence: no memory passed to the group is read or written any more. A broken group is never repaired.

The process's default group, which tensor parallelism may use, is not used. This module handles tensors only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Store

from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.backend import decode_session_info
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.sockets import Deadline

# Ranks of the two members.
RECEIVER, SENDER = 0, 1

MAX_VALUE_BYTES = 1 << 16
# Size of the proof that each end sends.
PROOF_BYTES = 16

_PAIR = struct.Struct("<II")


class RendezvousInfo(msgspec.Struct, frozen=True):
    # Library that transfers the bytes, with its version. Both ends need the same.
    library: str
    secret: bytes

    @classmethod
    def to(cls, library: str) -> RendezvousInfo:
        return cls(library, secrets.token_bytes(2 * PROOF_BYTES))

    @classmethod
    def read(cls, data: bytes, library: str) -> RendezvousInfo:
        """Decode session info. Raises ProtocolError if it is malformed or of another library."""
        session_info = decode_session_info(_session_infos, data)
        if session_info.library != library:
            raise ProtocolError(f"{library} against {session_info.library}: install the same on both sides")
        return session_info


_session_infos = msgspec.msgpack.Decoder(RendezvousInfo)


class ConnectionStore(Store):
    """Store of a rendezvous over the data connection: a key set by one end is sent to the other.

    After `seal` its content is fixed, because the connection then carries other data. Until then it has its own
    descriptor: a library may still read from it after the connection's owner has closed the original.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        super().__init__()
        self._socket = sock.dup()
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self._sealed = False

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if not self._sealed:
            name = key.encode()
            self._socket.sendall(_PAIR.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys until the deadline of the connection; `timeout` is ignored. Raises OSError, ProtocolError."""
        while not self.check(keys):
            if self._sealed:
                raise ProtocolError(f"the group's rendezvous is over, but {keys} are asked for")
            sockets.set_receive_timeout(self._socket, self._deadline.remaining())
            name_bytes, value_bytes = _PAIR.unpack(sockets.receive_exactly(self._socket, _PAIR.size))
            if max(name_bytes, value_bytes) > MAX_VALUE_BYTES:
                raise ProtocolError("not a rendezvous: run the same Splitserve release on both sides")
            name = sockets.receive_exactly(self._socket, name_bytes).decode(errors="replace")
            self._values[name] = sockets.receive_exactly(self._socket, value_bytes)

    def clone(self) -> ConnectionStore:
        return self

    def seal(self) -> None:
        """End the exchange of keys. Idempotent."""
        self._sealed = True
        self._socket.close()


# Seconds between two checks of the connection.
_LOOK_SECONDS = 0.01


def meet(
    make: Callable[[ConnectionStore], Any], sock: socket.socket, deadline: Deadline
) -> tuple[Any, ConnectionStore]:
    """Return the result of `make`, and the store of the rendezvous.

    To create a torch group, both members wait for each other without a way to interrupt them. So the wait runs in a
    thread of its own, and the caller waits only until the data connection ends. An abandoned thread holds none of our
    memory, because none was passed to its group. The interpreter waits for the thread at exit.

    Raises the errors of `make`, ConnectionError as soon as either end has ended the connection, TimeoutError.
    """
    store = ConnectionStore(sock, deadline)
    thread = ThreadPoolExecutor(1, "kv-meet")
    making = thread.submit(make, store)
    thread.shutdown(wait=False)
    try:
        while not wait([making], min(_LOOK_SECONDS, deadline.remaining())).done:
            if sockets.has_ended(sock):
                raise ConnectionError("the connection ended before the other member was there")
        return making.result(), store
    except BaseException:
        making.add_done_callback(lambda _: store.seal())
        raise


# Some attributes of torch.cuda have no types.
_cuda: Any = torch.cuda
# Tags of operations. `_POISON`: of a receive that nothing is sent for.
_DATA, _POISON = 0, 1
# Seconds between two polls of NCCL for completion.
_POLL_SECONDS = 50e-6

# Objects that an operation in flight needs. Hold them until the operation has ended.
Works = list[Any]


class GroupEnd:
    """One end of a group. Used only by the thread that created it."""

    def __init__(self, sock: socket.socket, rank: int, device: torch.device) -> None:
        # Device of its tensors.
        self.device = device
        self._socket = sock
        self._peer = 1 - rank
        # Tensors that follow each tensor.
        self._marks: tuple[torch.Tensor, ...] = ()
        # Set by the subclass.
        self._group: Any = None
        self._store: ConnectionStore

    def send(self, tensor: torch.Tensor) -> Works:
        """Start to send. Only the receiver can report completion."""
        with _losses_by_name():
            return [self._group.send([part], self._peer, _DATA) for part in (tensor, *self._marks)]

    def receive(self, tensor: torch.Tensor) -> Works:
        """Start to receive into the whole of `tensor`."""
        with _losses_by_name():
            parts = (tensor, *map(torch.empty_like, self._marks))
            return [self._group.recv([part], self._peer, _DATA) for part in parts]

    def wait(self, works: Works, deadline: Deadline) -> None:
        """Wait for the end of what `receive` started. Raises TimeoutError; ConnectionError if the peer is lost."""
        raise NotImplementedError

    def seal(self) -> None:
        """End the rendezvous. Call after the first operations: the group does not need it any more."""
        self._store.seal()

    def close(self) -> None:
        """Close the group and shut the data connection. On return, no tensor is read or written. Idempotent."""
        sockets.shut(self._socket)
        self._store.seal()
        group, self._group = self._group, None
        if group is not None:
            self._abort(group)

    def _abort(self, group: Any) -> None:
        raise NotImplementedError


class GlooGroup(GroupEnd):
    """Gloo over TCP, on the address at which the data connection runs.

    Gloo has no abort. A group breaks when a wait times out: gloo then closes the pair's connection, and its thread uses
    no buffer any more. If a group breaks, gloo ends the waits for operations that have not begun, but not for
    operations that are half done. So each tensor is followed by a mark of one byte, and only the wait for the mark
    counts: if the mark has arrived, so has the tensor.
    """

    def __init__(self, sock: socket.socket, rank: int, deadline: Deadline) -> None:
        from torch.distributed import ProcessGroupGloo

        super().__init__(sock, rank, torch.device("cpu"))
        self._marks = (torch.zeros(1, dtype=torch.uint8),)
        # These names are from torch's own tests; its type stubs have others.
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 1
        # Timeout of one attempt. The end that is connected to waits five times as long.
        options._timeout = timedelta(seconds=deadline.remaining() / 5)
        options._devices = [ProcessGroupGloo.create_device(hostname=sock.getsockname()[0])]
        with _losses_by_name():
            self._group, self._store = meet(lambda store: ProcessGroupGloo(store, rank, 2, options), sock, deadline)
        self._watcher = threading.Thread(target=self._watch, args=(self._group,), name="kv-gloo-watch", daemon=True)
        self._watcher.start()

    def wait(self, works: Works, deadline: Deadline) -> None:
        try:
            for work in reversed(works):
                # Zero would mean no timeout.
                work.wait(timedelta(seconds=max(deadline.remaining(), 0.001)))
        except RuntimeError as error:
            # Raises TimeoutError if the deadline has passed.
            deadline.remaining()
            raise ConnectionError(_first_line(error)) from error

    def _abort(self, group: Any) -> None:
        self._watcher.join()
        self._break(group)

    def _watch(self, group: Any) -> None:
        """Break the group when the data connection was shut at this end."""
        poller = select.poll()
        # No event mask: a hang-up is always reported.
        poller.register(self._socket, 0)
        poller.poll()
        self._break(group)

    def _break(self, group: Any) -> None:
        """Break the group by a receive that times out. Raises nothing if it was broken before."""
        with contextlib.suppress(RuntimeError):
            scratch = torch.empty_like(self._marks[0])
            group.recv([scratch], self._peer, _POISON).wait(timedelta(milliseconds=1))


class NcclGroup(GroupEnd):
    """NCCL between two GPUs, on a stream of its own. `abort` ends its kernels in any state."""

    def __init__(self, sock: socket.socket, rank: int, deadline: Deadline, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        super().__init__(sock, rank, device)
        torch.cuda.set_device(device)
        torch.cuda.set_stream(_cuda.Stream(device))
        options: Any = ProcessGroupNCCL.Options()
        self._store = ConnectionStore(sock, deadline)
        with _no_error_handling():
            self._group = ProcessGroupNCCL(self._store, rank, 2, options)

    def wait(self, works: Works, deadline: Deadline) -> None:
        with _losses_by_name():
            for work in works:
                # Does not block: it orders our stream after NCCL's.
                work.wait()
            # A failed operation never ends and does not report an error everywhere. Therefore poll an event of ours.
            over = _cuda.Event()
            over.record()
            while not over.query():
                deadline.remaining()
                # The connection carries no data while a write is in flight.
                if sockets.has_data(self._socket):
                    raise ConnectionError("the peer, or this side, ended the connection")
                time.sleep(_POLL_SECONDS)

    def _abort(self, group: Any) -> None:
        group.abort()


def nccl_version() -> str:
    return ".".join(str(number) for number in _cuda.nccl.version())


@contextlib.contextmanager
def _no_error_handling() -> Iterator[None]:
    """Disable torch's error handling, which ends the whole process when a member of an NCCL group is lost.

    A group reads the variable once, when it is created.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


_ENVIRONMENT = threading.Lock()


@contextlib.contextmanager
def _losses_by_name() -> Iterator[None]:
    """Convert errors: both libraries report a lost peer as a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
