"""Second end of a transport in a process of its own, that tests stop and kill, also over simulated GPUs.

`PeerProcess.ask` calls the methods of `End` there. `write` waits for the end of the write, and `begin` does not wait.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from splitserve.core.layout import Region
from splitserve.tools.bench import second_process as bench
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports.base import PeerAddress, Transport, TransportOptions
from support.fake_gpu import FAKE_CUDA_IPC, fake_cuda_ipc_transport
from support.fake_transport import FakeTransport

# Name, for `End`, of the transport with both ends in this process.
IN_PROCESS = "in process"
# Names, for `End`, of Mooncake between pools on a fake GPU -> where its staging slots are.
FAKE_MOONCAKES = {"mooncake of a fake GPU": "host", "mooncake on a fake GPU": "gpu"}

# Source region and offset, target region and offset, bytes.
CopyRow = tuple[int, int, int, int, int]


class TensorBytes:
    """Tensor of bytes with the interface of an array. Reads return a copy, and assignments write to the tensor."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.size: int = tensor.numel()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = self._tensor.cpu().numpy()
        return array

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        array = np.array(self)
        array[key] = value
        # The copy is complete when this returns.
        self._tensor.copy_(_tensor_of(array))

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == np.asarray(other)

    __hash__ = None  # type: ignore[assignment]

    def any(self) -> bool:
        return bool(np.asarray(self).any())


def _tensor_of(array: NDArray[np.uint8]) -> Any:
    import torch

    return torch.from_numpy(array)


class End(bench.End):
    """`End` of the bench, or one on a simulated GPU. All memory has the interface of arrays."""

    def _open(self, lengths: Sequence[int], device: str, options: TransportOptions) -> tuple[Transport, list[Region]]:
        # Tensors of bytes, for memory on a GPU.
        self.tensors: list[Any] = []
        if self.backend == IN_PROCESS:
            regions = self._allocate(lengths, is_shareable=False)
            return FakeTransport(on_progress=options.on_progress), regions
        if self.backend == FAKE_CUDA_IPC:
            regions = self._allocate(lengths, is_shareable=True)
            return fake_cuda_ipc_transport(options), regions
        if self.backend in FAKE_MOONCAKES:
            # Imported late: it needs torch, and most peers do not.
            from support.fake_device import FakeDevice, fake_mooncake_transport

            fake = FakeDevice(lengths)
            self.memory = fake.memory
            options = replace(options, extra={"staging": FAKE_MOONCAKES[self.backend]})
            return fake_mooncake_transport(options, fake), fake.regions
        opened = super()._open(lengths, device, options)
        if self.memory and not isinstance(self.memory[0], np.ndarray):
            self.tensors, self.memory = self.memory, [TensorBytes(tensor) for tensor in self.memory]
        return opened

    def drain(self, session: str) -> Any:
        return self.transport.drain(session)

    def is_fenced(self, session: str) -> bool:
        return self.transport.is_fenced(session)

    def fill(self, region: int, seed: int) -> None:
        memory = self.memory[region]
        memory[:] = random_bytes(memory.size, seed)

    def digest(self, region: int) -> str:
        return digest(self.memory[region])

    def begin(self, peer: PeerAddress, copies: Sequence[CopyRow]) -> int:
        return self.transport.write(peer, copy_table(copies)).id

    def write(self, peer: PeerAddress, copies: Sequence[CopyRow]) -> list[str | None]:
        status = self.outcome(self.transport.write(peer, copy_table(copies)))
        return [status.state.name, status.error]

    def write_for_ever(self, peer: PeerAddress, copies: Sequence[CopyRow]) -> None:
        def run() -> None:
            while self.write(peer, copies)[1] is None:
                pass

        self._writer = threading.Thread(target=run, daemon=True)
        self._writer.start()

    def have_writes_ended(self, timeout: float) -> bool:
        """Wait until the writes of `write_for_ever` have failed. Return whether that was within `timeout` seconds."""
        self._writer.join(timeout)
        return not self._writer.is_alive()


def close_quickly(ends: Sequence[bench.End]) -> None:
    """Close ends after a test, without the destructor of Mooncake's engines, which takes a second for each.

    A test of what an engine's end does drains or closes it itself.
    """
    with ExitStack() as stack:
        if any(end.backend == "mooncake-direct" for end in ends):
            from splitserve.transfer.transports.mooncake_engine import MooncakeTransferEngine

            stack.enter_context(patch.object(MooncakeTransferEngine, "destroy"))
        for end in ends:
            end.close()


def random_bytes(count: int, seed: int) -> NDArray[np.uint8]:
    # Made as words, which takes a fraction of the time.
    words = np.random.default_rng(seed).integers(0, 2**64, -(-count // 8), dtype=np.uint64)
    return words.view(np.uint8)[:count]


def digest(memory: NDArray[np.uint8] | TensorBytes) -> str:
    return hashlib.blake2b(np.asarray(memory).data, digest_size=16).hexdigest()


def _forks() -> ForkServerContext:
    """Return a context of processes that fork from one with the imports of most ends: each takes a second anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch"])
    return context


def thread_states(pid: int) -> str:
    """Return the states of a process's threads, a letter each: "R" runs, "S" waits for something, "T" is stopped."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            # After the name, in brackets.
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return "".join(states)


class PeerProcess(bench.PeerProcess):
    """`End` in a process of its own, with all methods of this module."""

    END = End
    CONTEXT = _forks()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until all threads have stopped, or the process has ended."""
        os.kill(self.pid, signal.SIGSTOP)
        while set(thread_states(self.pid)) - set("TZX"):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
