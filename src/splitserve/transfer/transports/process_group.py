"""KV pages between the two members of a group of torch.distributed: gloo between hosts, NCCL between GPUs.

1. The listener admits a sender. Both ends create a group for this connection (`groups.py`). They
   exchange a secret through it, because the library's own connections do not authenticate.
2. A write: the sender's frame over the data connection (`frames.py`), the receiver's answer, then the bytes through
   the group, piece by piece (`tensors.py`), each acknowledged over the data connection once it is in place.
3. At most WINDOW pieces are in flight: one moves while the next is gathered, or the previous one is scattered.
4. After any failure the group is closed with its connection, and the next write creates another. The loss of a member
   affects its own pair only.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import socket
from collections import deque
from collections.abc import Callable

import msgspec
import torch
import torch.distributed

from splitserve.core.errors import ConfigError
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.backend import ConnectionBackend, Incoming, Memory, SendingEnd
from splitserve.transfer.transports.base import TransportOptions
from splitserve.transfer.transports.device import CudaDevice, device_of
from splitserve.transfer.transports.frames import (
    ProtocolError,
    WriteFrame,
    receive_reply,
    receive_write_frame,
    send_reply,
    write_frame,
)
from splitserve.transfer.transports.groups import (
    PROOF_BYTES,
    RECEIVER,
    SENDER,
    GlooGroup,
    GroupEnd,
    NcclGroup,
    RendezvousInfo,
    Works,
    nccl_version,
)
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.tensors import DeviceMemory, ProcessMemory, Ranges, cut

# Maximum number of pieces in flight, and number of staging tensors at each end.
WINDOW = 2


def gloo_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport over gloo. Raises ConfigError if this torch has no gloo."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise ConfigError(f"torch {torch.__version__} is built without gloo: use --disaggregation-transfer-backend tcp")
    return SessionTransport(GlooBackend(options), options)


def nccl_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport over NCCL on `options.extra["device"]`, e.g. "cuda:1", else on the registered memory's GPU.

    Raises ConfigError if there is no GPU, or this torch has no NCCL.
    """
    remedy = "install a CUDA build of torch on a machine with a GPU, or use --disaggregation-transfer-backend tcp"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        raise ConfigError(f"torch {torch.__version__} is built without NCCL: {remedy}")
    if not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} finds no CUDA device: {remedy}")
    return SessionTransport(NcclBackend(options), options)


class ProcessGroupBackend(ConnectionBackend):
    # Name of the library with its version, which must be the same at both ends.
    library: str
    # Access to the registered memory.
    staged: ProcessMemory | DeviceMemory

    def __init__(self, options: TransportOptions) -> None:
        super().__init__()
        self.options = options

    def new_group(self, sock: socket.socket, rank: int, deadline: Deadline) -> GroupEnd:
        """Create our end of a group. The peer creates its own at the same time. Raises OSError, ProtocolError."""
        raise NotImplementedError

    def receive(self) -> ProcessGroupIncoming:
        return ProcessGroupIncoming(self)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> ProcessGroupOutgoing:
        info = RendezvousInfo.read(session_info, self.library)
        group = self.new_group(sock, SENDER, deadline)
        try:
            shown = _show(group, info.secret[:PROOF_BYTES])
            _see(group, info.secret[PROOF_BYTES:], deadline)
            # The receiver has checked our proof, or it would not have sent its own.
            shown.clear()
            group.seal()
        except BaseException:
            group.close()
            raise
        return ProcessGroupOutgoing(self, sock, group)

    def new_stages(self) -> Callable[[int], torch.Tensor]:
        """Return the staging tensors of one end as a function of the piece. They are created on demand."""
        stage = functools.cache(lambda slot: self.staged.stage())
        return lambda piece: stage(piece % WINDOW)


class GlooBackend(ProcessGroupBackend):
    library = "gloo of torch " + ".".join(torch.__version__.split(".")[:2])
    staged = ProcessMemory()

    def new_group(self, sock: socket.socket, rank: int, deadline: Deadline) -> GroupEnd:
        return GlooGroup(sock, rank, deadline)


class NcclBackend(ProcessGroupBackend):
    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        self.library = "NCCL " + nccl_version()
        device = options.extra.get("device")
        self._device = torch.device(device) if device else None

    def register(self, memory: Memory) -> None:
        super().register(memory)
        found = (device_of(region) for region in memory.regions)
        self._device = self._device or next((device for device in found if device is not None), None)
        if self._device is None:
            raise ConfigError("the transfer backend 'nccl' needs memory on a GPU: start the worker with --device cuda")
        self.staged = DeviceMemory(CudaDevice(self._device), memory.regions)

    def new_group(self, sock: socket.socket, rank: int, deadline: Deadline) -> GroupEnd:
        assert self._device is not None
        return NcclGroup(sock, rank, deadline, self._device)


def _show(group: GroupEnd, proof: bytes) -> Works:
    return group.send(torch.tensor(list(proof), dtype=torch.uint8, device=group.device))


def _see(group: GroupEnd, proof: bytes, deadline: Deadline) -> None:
    shown = torch.empty(PROOF_BYTES, dtype=torch.uint8, device=group.device)
    group.wait(group.receive(shown), deadline)
    if not hmac.compare_digest(bytes(shown.tolist()), proof):
        raise ProtocolError("the other member of the group is not the worker that came over the data connection")


class ProcessGroupOutgoing(SendingEnd):
    """Sending end. A shut socket interrupts it: replies arrive there, and the group watches it."""

    def __init__(self, backend: ProcessGroupBackend, sock: socket.socket, group: GroupEnd) -> None:
        super().__init__(sock)
        self._memory = backend.memory
        self._staged = backend.staged
        self._stage = backend.new_stages()
        self._group = group

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        sockets.send_all(self._socket, write_frame(ticket_id, copies), deadline)
        # Operations without a reply yet, oldest first: the frame, then pieces.
        owed: deque[Works] = deque([[]])
        try:
            self._send_pieces(ticket_id, copies, owed, deadline)
        except ConnectionError:
            # A receiver that refuses closes its group. The library may report that before we read the refusal.
            with contextlib.suppress(OSError):
                self._await_replies(ticket_id, owed, deadline)
            raise
        self._await_replies(ticket_id, owed, deadline)

    def _send_pieces(self, ticket_id: int, copies: Copies, owed: deque[Works], deadline: Deadline) -> None:
        for i, piece in enumerate(cut(self._memory.sources(copies), copies["length"])):
            self._await_replies(ticket_id, owed, deadline, but=WINDOW - 1)
            tensor = self._staged.view(piece)
            if tensor is None:
                tensor = self._staged.gather(piece, self._stage(i))
            owed.append(self._group.send(tensor))

    def _await_replies(self, ticket_id: int, owed: deque[Works], deadline: Deadline, but: int = 0) -> None:
        """Wait until at most `but` replies are missing."""
        while len(owed) > but:
            receive_reply(self._socket, ticket_id, deadline)
            owed.popleft()

    def close(self) -> None:
        self._group.close()


class ProcessGroupIncoming(Incoming):
    """Receiving end. Its writers are our own thread and the group, which `serve` closes."""

    def __init__(self, backend: ProcessGroupBackend) -> None:
        self._backend = backend
        self._options = backend.options
        self._memory = backend.memory
        self._staged = backend.staged
        self._session_info = RendezvousInfo.to(backend.library)

    def session_info(self) -> bytes:
        self._session_info = RendezvousInfo.to(self._backend.library)
        return msgspec.msgpack.encode(self._session_info)

    def serve(self, sock: socket.socket) -> None:
        deadline, secret = Deadline(self._options.connect_timeout), self._session_info.secret
        group = self._backend.new_group(sock, RECEIVER, deadline)
        try:
            _see(group, secret[:PROOF_BYTES], deadline)
            # Held until the sender has received it, as its first write proves.
            shown = _show(group, secret[PROOF_BYTES:])
            group.seal()
            sockets.set_receive_timeout(sock, 0)
            stage_of = self._backend.new_stages()
            while frame := receive_write_frame(sock):
                shown.clear()
                if refusal := self._memory.refusal(frame.targets, frame.length):
                    send_reply(sock, frame.ticket_id, refusal)
                    return
                self._take(sock, group, frame, stage_of)
        finally:
            group.close()

    def _take(
        self, sock: socket.socket, group: GroupEnd, frame: WriteFrame, stage_of: Callable[[int], torch.Tensor]
    ) -> None:
        """Receive one write into place and acknowledge each piece."""
        deadline = Deadline(self._options.write_timeout)
        send_reply(sock, frame.ticket_id)
        coming: deque[tuple[Works, Ranges, torch.Tensor | None]] = deque()

        def land() -> None:
            works, piece, stage = coming.popleft()
            group.wait(works, deadline)
            if stage is not None:
                self._staged.scatter(stage, piece)
            send_reply(sock, frame.ticket_id)

        for i, piece in enumerate(cut(self._memory.targets(frame.targets), frame.targets["length"])):
            if len(coming) == WINDOW:
                land()
            tensor, stage = self._staged.view(piece), None
            if tensor is None:
                stage = stage_of(i)
                tensor = stage[: piece.num_bytes]
            coming.append((group.receive(tensor), piece, stage))
        while coming:
            land()
