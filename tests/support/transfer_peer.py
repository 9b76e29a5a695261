"""Second end of a transport in a process of its own, that tests stop and kill, also over simulated GPUs.

More commands of that process: `drain`, `is_fenced`, `fill`, `digest`, `write` (waits for its end), `begin` (does not
wait), `write_for_ever`.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve.core.layout import Region
from splitserve.tools.bench import second_process as bench
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports.base import Transport, TransportOptions
from support.fake_gpu import FAKE_CUDA_IPC, fake_cuda_ipc_transport

# Names, for `End`, of Mooncake between pools on a fake GPU -> where its staging slots are.
FAKE_MOONCAKES = {"mooncake of a fake GPU": "host", "mooncake on a fake GPU": "gpu"}


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


def _obey(end: End, command: dict[str, Any], send: Callable[[Any], None]) -> Any:
    match command:
        case {"what": "drain", "session": session}:
            return end.transport.drain(session)
        case {"what": "is_fenced", "session": session}:
            return end.transport.is_fenced(session)
        case {"what": "fill", "region": region, "seed": seed}:
            memory = end.memory[region]
            memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)
            return None
        case {"what": "digest", "region": region}:
            return digest(end.memory[region])
        case {"what": "begin", "peer": peer, "copies": copies}:
            return end.transport.write(peer, copy_table(tuple(c) for c in copies)).id
        case {"what": "write", "peer": peer, "copies": copies}:
            status = end.outcome(end.transport.write(peer, copy_table(tuple(c) for c in copies)))
            return [status.state.name, status.error]
        case {"what": "write_for_ever", "peer": peer, "copies": copies}:
            table = copy_table(tuple(c) for c in copies)
            send(None)
            while end.outcome(end.transport.write(peer, table)).error is None:
                pass
            return None
    return bench.obey(end, command, send)


def digest(memory: NDArray[np.uint8] | TensorBytes) -> str:
    return hashlib.blake2b(np.asarray(memory).data, digest_size=16).hexdigest()


class PeerProcess(bench.PeerProcess):
    """`End` in a process of its own, with all commands of this module."""

    END = End
    OBEY = _obey

    def stop(self) -> None:
        """Send SIGSTOP, and wait until all threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
