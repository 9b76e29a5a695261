"""The division of a host's cores: what a worker may use while others are idle, busy, or have ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from splitserve.engine.kernels import cores
from splitserve.engine.kernels.cores import CoreTable
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.kernels.weights import PackedLinear, Scratch

# A process that imports the kernels, and forks another worker for each socket that it receives, with the worker's file
# and home cores. The worker sends its id, then a line after each order.
TEMPLATE = """
import os, signal, socket
from pathlib import Path
from splitserve.engine.kernels.cores import CoreTable
from splitserve.engine.kernels.library import find_library
library, control = find_library(), socket.socket(fileno=0)
# Nothing waits for a worker.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    settings, fds, *_ = socket.recv_fds(control, 4096, 1)
    if not fds:
        break
    if os.fork():
        os.close(fds[0])
        continue
    orders = socket.socket(fileno=fds[0]).makefile("rw")
    file, home_cores = settings.decode().splitlines()
    table = CoreTable(Path(file), num_cores=4)
    table.attach(library, home_cores=int(home_cores))
    print(os.getpid(), file=orders, flush=True)
    for order in orders:
        if order.startswith("begin"):
            step = table.computing(has_prompts=order == "begin prompts\\n")
            step.__enter__()
        else:
            step.__exit__(None, None, None)
        print("done", file=orders, flush=True)
    os._exit(0)
"""


class OtherWorker:
    def __init__(self, template: socket.socket, file: Path, home_cores: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(template, [f"{file}\n{home_cores}".encode()], [theirs.fileno()])
            self._orders = ours.makefile("rw")
        # A file descriptor, because its id may belong to another process after its end.
        self._process = os.pidfd_open(int(self._orders.readline()))

    def do(self, order: str) -> None:
        """Begin or end a step."""
        print(order, file=self._orders, flush=True)
        assert self._orders.readline() == "done\n"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        # Until it has ended, and so has released its lock.
        select.select([self._process], [], [])

    def close(self) -> None:
        self.kill()
        os.close(self._process)
        self._orders.close()


@pytest.fixture(scope="module")
def template() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([sys.executable, "-c", TEMPLATE], stdin=theirs):
        theirs.close()
        yield ours
        ours.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def start_other(template: socket.socket, file: Path) -> Iterator[Callable[[int], OtherWorker]]:
    started: list[OtherWorker] = []

    def start(home_cores: int) -> OtherWorker:
        started.append(OtherWorker(template, file, home_cores))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def table(library: KernelLibrary, file: Path) -> Iterator[CoreTable]:
    """Our row: two of four cores."""
    table = CoreTable(file, num_cores=4)
    table.attach(library, home_cores=2)
    yield table
    table.close()


def test_a_worker_alone_may_use_all_cores(library: KernelLibrary, table: CoreTable) -> None:
    with table.computing():
        assert library.threads_allowed() == 4


def test_cores_of_another_worker_are_lent_while_it_is_idle(
    library: KernelLibrary, table: CoreTable, start_other: Callable[[int], OtherWorker]
) -> None:
    other = start_other(2)
    assert library.threads_allowed() == 4
    other.do("begin")
    assert library.threads_allowed() == 2
    other.do("end")
    assert library.threads_allowed() == 4


def test_busy_workers_divide_the_cores_of_idle_ones(
    library: KernelLibrary, table: CoreTable, start_other: Callable[[int], OtherWorker]
) -> None:
    start_other(1).do("begin")
    # Three of four cores are home of busy workers; a third of the fourth is not ours.
    assert library.threads_allowed() == 2
    start_other(2).do("begin")
    # More homes than cores: each keeps its own.
    assert library.threads_allowed() == 2


def test_a_worker_that_was_killed_in_a_step_lends_its_cores_again(
    library: KernelLibrary, table: CoreTable, start_other: Callable[[int], OtherWorker]
) -> None:
    other = start_other(2)
    other.do("begin")
    other.kill()
    assert library.threads_allowed() == 2
    with table.computing():
        assert library.threads_allowed() == 4


def test_a_step_within_a_step_does_not_lend_the_cores(file: Path, table: CoreTable) -> None:
    with table.computing():
        with table.computing():
            pass
        assert file.read_bytes()[4] == 1
    assert file.read_bytes()[4] == 0


def test_each_worker_knows_whether_any_computes(table: CoreTable, start_other: Callable[[int], OtherWorker]) -> None:
    assert not table.is_host_computing()
    with table.computing():
        assert table.is_host_computing()
    other = start_other(2)
    assert not table.is_host_computing()
    other.do("begin")
    assert table.is_host_computing()
    other.do("end")
    assert not table.is_host_computing()


def test_each_worker_knows_whether_another_computes_prompts(
    table: CoreTable, start_other: Callable[[int], OtherWorker]
) -> None:
    other = start_other(2)
    with table.computing(has_prompts=True):
        assert not table.has_other_prompts()
    for order, expected in (("begin", False), ("end", False), ("begin prompts", True), ("end", False)):
        other.do(order)
        assert table.has_other_prompts() is expected


def test_a_step_of_a_draft_model_belongs_to_its_step(file: Path, table: CoreTable) -> None:
    with table.computing(has_prompts=True):
        with table.computing():
            pass
        assert file.read_bytes()[8] == 1
    assert file.read_bytes()[8] == 0


class Kernel(ctypes.Structure):
    """struct kernel of pool.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("num_phases", "num_tasks", "run"))


def test_a_thread_returns_to_a_phase_when_its_core_is_lent_again(
    library: KernelLibrary, file: Path, start_other: Callable[[int], OtherWorker]
) -> None:
    """A phase of a prompt takes longer than the pause between two steps of the core's owner."""
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    caller, has_helped, helped_early = threading.get_ident(), threading.Event(), []
    other = start_other(1)
    other.do("begin")

    @ctypes.CFUNCTYPE(None, pointer, number, number)
    def run(_args: int, _phase: int, task: int) -> None:
        if threading.get_ident() != caller:
            has_helped.set()
        elif task == 500:
            helped_early.append(has_helped.is_set())
            other.do("end")
        elif task > 500:
            has_helped.wait(10)

    num_phases = ctypes.CFUNCTYPE(number, pointer)(lambda _: 1)
    num_tasks = ctypes.CFUNCTYPE(number, pointer, number)(lambda *_: 503)
    functions = (ctypes.cast(function, pointer) for function in (num_phases, num_tasks, run))
    kernel, table = Kernel(*functions), CoreTable(file, num_cores=2)
    table.attach(library, home_cores=1)
    try:
        ctypes.CDLL(str(library.file)).run_kernel(ctypes.byref(kernel), None, number(2))
    finally:
        table.close()
    assert helped_early == [False]
    assert has_helped.is_set()


def test_a_process_outside_the_table_does_not_know_whether_any_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_tables", {})
    assert cores.is_host_computing() is None


def test_a_row_is_used_again(file: Path, table: CoreTable, start_other: Callable[[int], OtherWorker]) -> None:
    for _ in range(3):
        start_other(2).kill()
    rows = file.read_bytes()
    # Ours, and the one that the three had in turn.
    assert [i for i in range(64) if any(rows[64 * i : 64 * i + 4])] == [0, 1]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        CoreTable(tmp_path / "link", num_cores=2)


def test_products_do_not_depend_on_the_cores_in_use(
    library: KernelLibrary, table: CoreTable, start_other: Callable[[int], OtherWorker]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 96, generator=generator).bfloat16() for n in (512, 700))
    other, outputs = start_other(2), []
    for order in ("begin", "end"):
        other.do(order)
        outputs.append(PackedLinear(library, Scratch(), weight)(rows))
    assert torch.equal(*outputs)


def test_the_memory_of_the_table_is_allocated_before_it_is_written(file: Path) -> None:
    """With a full /dev/shm the constructor must fail: a write to the mapping would end the process with SIGBUS."""
    table = CoreTable(file, num_cores=4)
    try:
        assert file.stat().st_blocks * 512 >= file.stat().st_size == 4096
    finally:
        table.close()
