"""Mooncake's TransferEngine with exceptions instead of return codes, and with reuse of engines.

Life of an engine:
1. `take_engine` returns an idle or a new engine for use with one peer (or by one receiving transport).
2. `initialize` opens its two ports. Peers exchange their keys directly (P2PHANDSHAKE), without etcd.
3. Memory is registered, transfers are submitted and polled.
4. `give_back` makes it idle until the next use. It is not destroyed, because the library's destructor holds Python's
   lock for a second. Only the ends of `mooncake_direct.py` call `destroy`: it is their fence.

Properties of the library (0.3.13): A transfer over tcp is complete when the receiver has acknowledged that it is in its
memory. A transfer cannot be cancelled. A peer cannot be excluded; memory can only be deregistered, which stops the
transfers that begin later. Both ports listen on every address without authentication: any client can read and write
registered memory. Therefore `mooncake.py` registers only staging buffers by default.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from splitserve.core.errors import ConfigError, OptionError

# The library reads it on import. The default logs a lot.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.engine import TransferEngine, TransferOpcode

logger = logging.getLogger(__name__)

PROTOCOLS = ("tcp", "rdma")
# Maximum transfers per batch. The library queues 1,024 for a peer and refuses a whole batch on overflow.
MAX_BATCH = 512

# One library, with one wheel for each kind of machine.
_DISTRIBUTION = "mooncake-transfer-engine"
_WITHOUT_CUDA = f"{_DISTRIBUTION}-non-cuda"
_DISTRIBUTIONS = (_DISTRIBUTION, f"{_DISTRIBUTION}-cuda13", _WITHOUT_CUDA, f"{_DISTRIBUTION}-efa")
_RDMA_DEVICES = Path("/sys/class/infiniband")


class MooncakeError(Exception):
    """Error of the library: what failed, for which session and size, and what to do."""


class MooncakeTransferEngine:
    """One engine. `hostname`: our address. `gpu_id`: GPU of its memory, -1: the CPU. `ib_device`: device names."""

    def __init__(self, hostname: str, gpu_id: int = -1, ib_device: str = "", protocol: str = "tcp") -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(f"mooncake: unknown protocol {protocol!r}: choose one of {', '.join(PROTOCOLS)}")
        self.hostname = hostname
        self.gpu_id = gpu_id
        self.ib_device = ib_device
        self.protocol = protocol
        # Distinguishes this engine from an earlier one, of a dead process, at the same address.
        self.incarnation = secrets.token_hex(8)
        # Session that this engine has written to -> incarnation. The engine never forgets the ports of a session.
        self.known: dict[str, str] = {}
        # Memory that must keep its addresses while the engine exists. See `StagingBuffer.discard`.
        self.kept: list[object] = []
        self._engine: TransferEngine | None = None
        # Set by `destroy`. Refers to nothing once the library's engine is gone.
        self._destroyed: weakref.ref[TransferEngine] | None = None

    def initialize(self) -> None:
        """Open the ports. Raises ConfigError if the machine lacks what the protocol needs."""
        if self.protocol == "rdma" and not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
            raise ConfigError(f"mooncake: protocol rdma, but {_RDMA_DEVICES} lists no device: use protocol=tcp")
        _set_environment(self.protocol)
        engine = TransferEngine()
        if code := engine.initialize(self.hostname, "P2PHANDSHAKE", self.protocol, self.ib_device):
            where = f"{self.hostname}, protocol {self.protocol}, devices {self.ib_device or 'any'}"
            raise ConfigError(f"mooncake cannot start on {where} (code {code}): check address and device names")
        # Do not destroy the library's engine with this object: see the module's docstring.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        self._engine = engine

    def destroy(self) -> None:
        """End the engine's threads, connections and registrations. Idempotent.

        Holds Python's lock for up to a second. `is_destroyed` reports whether the library accesses no memory any more.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            self._destroyed = weakref.ref(engine)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(engine))

    @property
    def is_destroyed(self) -> bool:
        """Return whether the library's engine is gone. False while a thread is inside one of its functions."""
        return self._destroyed is not None and self._destroyed() is None

    def get_session_id(self) -> str:
        """Return the name of this engine for peers: "address:port"."""
        return f"{self.hostname}:{self._library().get_rpc_port()}"

    def register(self, address: int, length: int) -> None:
        """Let peers read and write this range. It must not overlap another registered range."""
        location = "*" if self.gpu_id < 0 else f"cuda:{self.gpu_id}"
        if code := self._library().batch_register_memory([address], [length], location):
            what = f"a range of {length} bytes"
            raise MooncakeError(f"mooncake cannot register {what} (code {code}): overlapping, empty or not lockable")

    def deregister(self, address: int) -> None:
        """Refuse transfers into a registered range that begin from now on. Transfers in flight continue."""
        if code := self._library().batch_unregister_memory([address]):
            raise MooncakeError(f"mooncake cannot deregister the range at {address:#x} (code {code})")

    def transfer_sync(self, session_id: str, buffer: int, peer_address: int, length: int) -> None:
        """Write and wait, for up to half a minute plus a second per GiB. The wait uses a whole core."""
        opcode = TransferOpcode.Write
        self._check(self._library().transfer_sync(session_id, buffer, peer_address, length, opcode), session_id, length)

    def batch_transfer_sync(
        self, session_id: str, buffers: Sequence[int], peer_addresses: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Do `transfer_sync` in batches that the library accepts."""
        for i in range(0, len(lengths), MAX_BATCH):
            part = slice(i, i + MAX_BATCH)
            code = self._library().batch_transfer_sync(
                session_id, list(buffers[part]), list(peer_addresses[part]), list(lengths[part]), TransferOpcode.Write
            )
            self._check(code, session_id, sum(lengths[part]))

    def submit(self, session_id: str, buffer: int, peer_address: int, length: int) -> Transfer:
        """Start a write, to be polled. The first write to a session fetches the peer's ports: up to a minute."""
        transfer = self._library().transfer_submit_write(session_id, buffer, peer_address, length)
        # A batch id is an address. Failures are -1, which the binding converts to an unsigned number.
        if transfer in (0, -1, (1 << 64) - 1):
            self._check(-1, session_id, length)
        return Transfer(transfer, session_id, length)

    def is_done(self, transfer: Transfer) -> bool:
        """Return whether the transfer is complete. Raises MooncakeError on failure. A final result is returned once."""
        code = self._library().transfer_check_status(transfer.id)
        if code < 0:
            self._check(code, transfer.session_id, transfer.length)
        return bool(code)

    def _library(self) -> TransferEngine:
        if self._engine is None:
            raise MooncakeError("this mooncake engine is not initialized")
        return self._engine

    @staticmethod
    def _check(code: int, session_id: str, length: int) -> None:
        if code:
            what = f"mooncake could not transfer {length} bytes to {session_id} (code {code})"
            raise MooncakeError(f"{what}: see whether that worker is alive; MC_LOG_LEVEL=INFO makes the library talk")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A submitted transfer."""

    id: int
    session_id: str
    # Length in bytes.
    length: int


_lock = threading.Lock()
_idle: list[MooncakeTransferEngine] = []
# Returned engines with transfers in flight, and what to call when these have ended.
_busy: list[tuple[MooncakeTransferEngine, list[Transfer], Callable[[], None]]] = []


def take_engine(
    hostname: str, ib_device: str, protocol: str, peer: tuple[str, str] = ("", ""), gpu_id: int = -1
) -> MooncakeTransferEngine:
    """Take an engine with memory on one device, to write to `peer` (session, incarnation). Raises ConfigError."""
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
    """Return an engine. After `transfers` have ended, `when_idle` releases their memory, and the engine is idle."""
    with _lock:
        _busy.append((engine, list(transfers), when_idle))
        _collect()


def _collect() -> None:
    """Move engines without transfers in flight to the idle list. Call with the lock held."""
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
                # The caller uses another connection and continues. The library keeps the memory registered.
                logger.exception("memory of an ended connection stays registered")


def _has_ended(engine: MooncakeTransferEngine, transfer: Transfer) -> bool:
    try:
        return engine.is_done(transfer)
    except MooncakeError:
        return True


def library_version() -> str:
    return _installed()[1]


def check_reaches_gpus() -> None:
    """Check that the library is not the build for memory of the CPU only. Raises ConfigError."""
    name, version = _installed()
    if name == _WITHOUT_CUDA:
        raise OptionError(
            "--transfer-option",
            f"staging=gpu: {name} {version} takes every address for the CPU's. Install "
            f"{_DISTRIBUTION}=={version} in its place, or leave it at staging=host",
        )


def _installed() -> tuple[str, str]:
    """Return name and version of the library's distribution."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", "unknown"


def _set_environment(protocol: str) -> None:
    """Set the environment variables that the library reads when an engine starts."""
    # Without this variable the library uses RDMA for any protocol, if it finds a device.
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    else:
        os.environ.pop("MC_FORCE_TCP", None)
    # The older framing reports a write as complete once it has left the sender. That proves nothing.
    os.environ["MC_TCP_PROTO"] = "2"
