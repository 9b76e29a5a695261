"""Second end of a transport in a process of its own, for tests and benchmarks that stop or kill it.

`PeerProcess` starts `python -m splitserve.testing.transfer_peer SPEC`. It opens a transport over its own memory and
runs one JSON command per line: `open`, `drain`, `is_fenced`, `fill`, `set`, `digest`, `cpu_seconds`, `write` (waits for
its end), `begin` (does not wait), `write_for_ever`. It answers each with one JSON line.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from splitserve.core.arena import Arena
from splitserve.core.layout import Region
from splitserve.testing.fake_gpu import FAKE_CUDA_IPC, fake_cuda_ipc_transport
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import create_transport, needs_shareable_memory
from splitserve.transfer.transports.base import PeerAddress, Ticket, Transport, TransportOptions, WriteStatus

# Seconds to wait for an answer.
ANSWER_TIMEOUT = 60.0


# Names, for `End`, of Mooncake between pools on a fake GPU -> where its staging slots are.
FAKE_MOONCAKES = {"mooncake of a fake GPU": "host", "mooncake on a fake GPU": "gpu"}
# Backends that need memory on a GPU.
_ON_GPU = frozenset({"cuda_ipc", "nccl"})


def _arena(num_bytes: int, backend: str) -> Arena:
    return Arena(num_bytes, shareable=backend == FAKE_CUDA_IPC or needs_shareable_memory(backend))


def _bytes_on_gpu(num_bytes: int, device: str) -> Any:
    # Imported late: most peers do not need torch.
    import torch

    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return memory


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


class End:
    """Transport over its own memory, with one region of each of `lengths` bytes."""

    def __init__(self, backend: str, lengths: Sequence[int], *, device: str = "cuda", **options: Any) -> None:
        """Open the transport. `device`: where memory is allocated that must be on a GPU."""
        self.backend = backend
        self.progress = threading.Event()
        if backend in FAKE_MOONCAKES:
            self._begin_on_fake_gpu(lengths, FAKE_MOONCAKES[backend], **options)
            return
        is_fake_gpu, is_on_gpu = backend == FAKE_CUDA_IPC, backend in _ON_GPU
        self.arenas = [] if is_on_gpu else [_arena(n, backend) for n in lengths]
        # Tensors of bytes, in place of arenas, for memory on a GPU.
        self.tensors = [_bytes_on_gpu(n, device) for n in lengths] if is_on_gpu else []
        self.memory: list[Any] = [np.frombuffer(a.buffer, dtype=np.uint8) for a in self.arenas]
        self.memory += [TensorBytes(tensor) for tensor in self.tensors]
        told = TransportOptions(on_progress=self.progress.set, **options)
        self.transport: Transport = fake_cuda_ipc_transport(told) if is_fake_gpu else create_transport(backend, told)
        regions = [a.region() for a in self.arenas] or [Region(t.data_ptr(), t.numel()) for t in self.tensors]
        self.transport.register(regions)

    def _begin_on_fake_gpu(self, lengths: Sequence[int], staging: str, **options: Any) -> None:
        # Imported late: it needs torch, and most peers do not.
        from splitserve.testing.fake_device import FakeDevice, fake_mooncake_transport

        device = FakeDevice(lengths)
        self.memory, self.tensors = device.memory, []
        told = TransportOptions(on_progress=self.progress.set, extra={"staging": staging}, **options)
        self.transport = fake_mooncake_transport(told, device)
        self.transport.register(device.regions)

    def outcome(self, ticket: Ticket, timeout: float = ANSWER_TIMEOUT) -> WriteStatus:
        """Return the ticket's final status. Raises AssertionError if the write does not end in time."""
        end = time.monotonic() + timeout
        while not (status := self.transport.poll(ticket)).is_final:
            if not self.progress.wait(end - time.monotonic()):
                raise AssertionError("the write did not end")
            self.progress.clear()
        return status

    def close(self) -> None:
        self.transport.close()


class PeerProcess:
    """`End` in a process of its own. Use as a context manager."""

    def __init__(self, backend: str, lengths: Sequence[int], **options: Any) -> None:
        spec = json.dumps({"backend": backend, "lengths": list(lengths), "options": options})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "splitserve.testing.transfer_peer", spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> PeerProcess:
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

    def stop(self) -> None:
        """Send SIGSTOP, and wait until all threads have stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended. Idempotent."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_ANSWER = "ANSWER "


def _obey(end: End, command: dict[str, Any]) -> Any:
    match command:
        case {"what": "open"}:
            peer = end.transport.open_session()
            return [peer.session_id, peer.endpoint]
        case {"what": "drain", "session": session}:
            return end.transport.drain(session)
        case {"what": "is_fenced", "session": session}:
            return end.transport.is_fenced(session)
        case {"what": "fill", "region": region, "seed": seed}:
            memory = end.memory[region]
            memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)
            return None
        case {"what": "set", "region": region, "value": value}:
            end.memory[region][:] = value
            return None
        case {"what": "cpu_seconds"}:
            return time.process_time()
        case {"what": "digest", "region": region}:
            return digest(end.memory[region])
        case {"what": "begin", "peer": peer, "copies": copies}:
            return end.transport.write(PeerAddress(*peer), copy_table(tuple(c) for c in copies)).id
        case {"what": "write", "peer": peer, "copies": copies}:
            status = end.outcome(end.transport.write(PeerAddress(*peer), copy_table(tuple(c) for c in copies)))
            return [status.state.name, status.error]
        case {"what": "write_for_ever", "peer": peer, "copies": copies}:
            table = copy_table(tuple(c) for c in copies)
            _say(None)
            while end.outcome(end.transport.write(PeerAddress(*peer), table)).error is None:
                pass
            return None
    raise ValueError(f"unknown command {command}")


def digest(memory: NDArray[np.uint8] | TensorBytes) -> str:
    return hashlib.blake2b(np.asarray(memory).data, digest_size=16).hexdigest()


def _say(answer: Any) -> None:
    sys.stdout.write(_ANSWER + json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(spec: str, commands: TextIO) -> None:
    told = json.loads(spec)
    options = told["options"]
    if "token" in options:
        options["token"] = options["token"].encode()
    end = End(told["backend"], told["lengths"], **options)
    try:
        for line in commands:
            _say(_obey(end, json.loads(line)))
    finally:
        end.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin)
