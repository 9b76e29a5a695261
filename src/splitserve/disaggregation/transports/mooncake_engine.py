"""Mooncake's TransferEngine as we use it: return codes become exceptions, and engines are used again.

Life of an engine:
1. `take_engine` hands out one for the use of one peer (or of one receiving transport): an idle one, or a new one.
2. `initialize` opens its two ports; peers exchange what they must know directly (P2PHANDSHAKE), without etcd.
3. Memory is registered, transfers are submitted and polled.
4. `give_back` lays it down until somebody needs one. It is never destroyed while the process lives: the library's
   destructor holds Python's lock for a second.

What the library is like (0.3.13): a transfer over tcp is complete when the receiver has acknowledged that it lies in
its memory; a transfer cannot be cancelled; a peer cannot be shut out, only memory be deregistered, which stops the
transfers that begin later; both ports listen on every address and know no token: whoever reaches them can read and
write what is registered. So `mooncake.py` registers staging buffers alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from splitserve.errors import ConfigError

# The library reads it when it is loaded, and is talkative without.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.engine import TransferEngine, TransferOpcode

logger = logging.getLogger(__name__)

PROTOCOLS = ("tcp", "rdma")
# Transfers one batch may hold. The library queues 1,024 for a peer and refuses the whole batch when it overflows.
MAX_BATCH = 512

# One library, one wheel for each kind of machine.
_DISTRIBUTION = "mooncake-transfer-engine"
_WITHOUT_CUDA = f"{_DISTRIBUTION}-non-cuda"
_DISTRIBUTIONS = (_DISTRIBUTION, f"{_DISTRIBUTION}-cuda13", _WITHOUT_CUDA, f"{_DISTRIBUTION}-efa")
_RDMA_DEVICES = Path("/sys/class/infiniband")


class MooncakeError(Exception):
    """The library refused or failed: what, for which session, of which size, and what to do."""


class MooncakeTransferEngine:
    """One engine. `hostname`: our address; `gpu_id`: whose memory it registers, -1: the CPU's; `ib_device`: names."""

    def __init__(self, hostname: str, gpu_id: int = -1, ib_device: str = "", protocol: str = "tcp") -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(f"mooncake: unknown protocol {protocol!r}: choose one of {', '.join(PROTOCOLS)}")
        self.hostname = hostname
        self.gpu_id = gpu_id
        self.ib_device = ib_device
        self.protocol = protocol
        # Tells this engine from an earlier one, of a dead process, at the same address.
        self.incarnation = secrets.token_hex(8)
        # The incarnation behind each session that this engine has written to: it remembers their ports for good.
        self.known: dict[str, str] = {}
        # Memory that must keep its addresses as long as the engine lives. See `StagingBuffer.discard`.
        self.kept: list[object] = []
        self._engine: TransferEngine | None = None

    def initialize(self) -> None:
        """Open the ports. Raises ConfigError where the machine has not what the protocol needs."""
        if self.protocol == "rdma" and not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
            raise ConfigError(f"mooncake: protocol rdma, but {_RDMA_DEVICES} lists no device: use protocol=tcp")
        _set_environment(self.protocol)
        engine = TransferEngine()
        if code := engine.initialize(self.hostname, "P2PHANDSHAKE", self.protocol, self.ib_device):
            where = f"{self.hostname}, protocol {self.protocol}, devices {self.ib_device or 'any'}"
            raise ConfigError(f"mooncake cannot start on {where} (code {code}): check address and device names")
        # For ever: see the module's docstring.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        self._engine = engine

    def get_session_id(self) -> str:
        """What peers call us by: "address:port"."""
        return f"{self.hostname}:{self._library().get_rpc_port()}"

    def register(self, address: int, length: int) -> None:
        self.batch_register([address], [length])

    def deregister(self, address: int) -> None:
        self.batch_deregister([address])

    def batch_register(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """Let peers read and write these ranges. They must not overlap each other or what is registered."""
        location = "*" if self.gpu_id < 0 else f"cuda:{self.gpu_id}"
        if code := self._library().batch_register_memory(list(addresses), list(lengths), location):
            what = f"{len(addresses)} ranges of {sum(lengths)} bytes"
            raise MooncakeError(f"mooncake cannot register {what} (code {code}): overlapping, empty or not lockable")

    def batch_deregister(self, addresses: Sequence[int]) -> None:
        """Transfers into these ranges that begin from now on are refused; those under way go on."""
        if code := self._library().batch_unregister_memory(list(addresses)):
            raise MooncakeError(f"mooncake cannot deregister {len(addresses)} ranges (code {code})")

    def transfer_sync(self, session_id: str, buffer: int, peer_address: int, length: int) -> None:
        """Write and wait, for up to half a minute and a second per GiB. The wait spins: it takes a core."""
        opcode = TransferOpcode.Write
        self._check(self._library().transfer_sync(session_id, buffer, peer_address, length, opcode), session_id, length)

    def batch_transfer_sync(
        self, session_id: str, buffers: Sequence[int], peer_addresses: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """As `transfer_sync`, in batches of what the library accepts."""
        for i in range(0, len(lengths), MAX_BATCH):
            part = slice(i, i + MAX_BATCH)
            code = self._library().batch_transfer_sync(
                session_id, list(buffers[part]), list(peer_addresses[part]), list(lengths[part]), TransferOpcode.Write
            )
            self._check(code, session_id, sum(lengths[part]))

    def submit(self, session_id: str, buffer: int, peer_address: int, length: int) -> Transfer:
        """Begin a write, to be polled. The first to a session asks the peer for its ports, and may take a minute."""
        transfer = self._library().transfer_submit_write(session_id, buffer, peer_address, length)
        # A batch's identity is an address; failures come as -1, which the binding turns into an unsigned number.
        if transfer in (0, -1, (1 << 64) - 1):
            self._check(-1, session_id, length)
        return Transfer(transfer, session_id, length)

    def is_done(self, transfer: Transfer) -> bool:
        """Whether it lies in the peer's memory. Raises MooncakeError where it never will. Final answers come once."""
        code = self._library().transfer_check_status(transfer.id)
        if code < 0:
            self._check(code, transfer.session_id, transfer.length)
        return bool(code)

    def close(self) -> None:
        """Forget the engine. The library's own goes on, idle, until the process ends."""
        self._engine = None

    def _library(self) -> TransferEngine:
        if self._engine is None:
            raise MooncakeError("this mooncake engine is not initialized, or closed")
        return self._engine

    @staticmethod
    def _check(code: int, session_id: str, length: int) -> None:
        if code:
            what = f"mooncake could not transfer {length} bytes to {session_id} (code {code})"
            raise MooncakeError(f"{what}: see whether that worker is alive; MC_LOG_LEVEL=INFO makes the library talk")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One that was submitted."""

    id: int
    session_id: str
    # Bytes.
    length: int


_lock = threading.Lock()
_idle: list[MooncakeTransferEngine] = []
# Given back with transfers under way, and what to do when these have ended.
_busy: list[tuple[MooncakeTransferEngine, list[Transfer], Callable[[], None]]] = []


def take_engine(
    hostname: str, ib_device: str, protocol: str, peer: tuple[str, str] = ("", ""), gpu_id: int = -1
) -> MooncakeTransferEngine:
    """An engine nobody uses, for memory of one place, to write to `peer` (session, incarnation). Raises ConfigError."""
    session, incarnation = peer
    with _lock:
        _collect()
        for i, engine in enumerate(_idle):
            settings = (engine.hostname, engine.ib_device, engine.protocol, engine.gpu_id)
            is_like = settings == (hostname, ib_device, protocol, gpu_id)
            if is_like and engine.known.get(session, incarnation) == incarnation:
                del _idle[i]
                break
        else:
            engine = MooncakeTransferEngine(hostname, gpu_id, ib_device, protocol)
            engine.initialize()
    engine.known[session] = incarnation
    return engine


def give_back(
    engine: MooncakeTransferEngine, transfers: Sequence[Transfer] = (), when_idle: Callable[[], None] = lambda: None
) -> None:
    """Lay an engine down. Once `transfers` have ended, `when_idle` releases the memory they read, and it is idle."""
    with _lock:
        _busy.append((engine, list(transfers), when_idle))
        _collect()


def _collect() -> None:
    """With the lock held: which engines have become idle?"""
    for entry in list(_busy):
        engine, transfers, when_idle = entry
        while transfers and _has_ended(engine, transfers[0]):
            del transfers[0]
        if not transfers:
            _busy.remove(entry)
            _idle.append(engine)
            try:
                when_idle()
            except MooncakeError:
                # Whoever collects is another connection, and not concerned. The library keeps what it would not let go.
                logger.exception("memory of an ended connection stays registered")


def _has_ended(engine: MooncakeTransferEngine, transfer: Transfer) -> bool:
    try:
        return engine.is_done(transfer)
    except MooncakeError:
        return True


def library_version() -> str:
    return _installed()[1]


def check_reaches_gpus() -> None:
    """Raises ConfigError where the library is the build that knows memory of the CPU only."""
    name, version = _installed()
    if name == _WITHOUT_CUDA:
        raise ConfigError(
            f"--transfer-option staging=gpu: {name} {version} takes every address for the CPU's. Install "
            f"{_DISTRIBUTION}=={version} in its place, or leave it at staging=host"
        )


def _installed() -> tuple[str, str]:
    """Name and version of the library's distribution."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", "unknown"


def _set_environment(protocol: str) -> None:
    """The library reads its settings when an engine starts."""
    # Without it the library takes RDMA wherever it sees a device, whatever the protocol is.
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    else:
        os.environ.pop("MC_FORCE_TCP", None)
    # The older framing calls a write complete that has only left the sender: nothing would be proven.
    os.environ["MC_TCP_PROTO"] = "2"
