"""Orders: a worker that reaches the stage fails once, unless the order was withdrawn. Writes stop in their middle."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.tools.chaos.faults import Fault, FaultOrder, FaultStage, Trap, _halved, fault_file
from splitserve.transfer.copies import copy_table

READY_FILE = "worker.ready.json"


@pytest.fixture
def victim():
    """A process that sleeps until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_the_stage_kills_when_it_was_passed_often_enough_and_then_never_again(tmp_path, victim):
    order = FaultOrder.give(tmp_path / READY_FILE, Fault(FaultStage.MID_CHUNK, signal.SIGKILL, skip=2))
    trap = Trap(fault_file(tmp_path / READY_FILE), [victim.pid])
    for stage in (FaultStage.MID_CHUNK, FaultStage.QUEUED, FaultStage.MID_CHUNK, FaultStage.MID_TRANSFER):
        trap.reach(stage)
        assert not order.is_taken
    trap.reach(FaultStage.MID_CHUNK)
    assert order.is_taken
    assert not order.withdraw()
    assert victim.wait(60) == -signal.SIGKILL
    # The process has ended, and the order is removed.
    trap.reach(FaultStage.MID_CHUNK)


def test_what_is_withdrawn_does_not_happen(tmp_path, victim):
    order = FaultOrder.give(tmp_path / READY_FILE, Fault(FaultStage.QUEUED, signal.SIGKILL))
    assert order.withdraw()
    Trap(fault_file(tmp_path / READY_FILE), [victim.pid]).reach(FaultStage.QUEUED)
    assert victim.poll() is None


def test_a_new_order_counts_anew(tmp_path, victim):
    trap = Trap(fault_file(tmp_path / READY_FILE), [victim.pid])
    first = FaultOrder.give(tmp_path / READY_FILE, Fault(FaultStage.QUEUED, signal.SIGKILL, skip=1))
    trap.reach(FaultStage.QUEUED)
    assert first.withdraw()
    second = FaultOrder.give(tmp_path / READY_FILE, Fault(FaultStage.QUEUED, signal.SIGKILL, skip=1))
    trap.reach(FaultStage.QUEUED)
    assert not second.is_taken
    trap.reach(FaultStage.QUEUED)
    assert second.is_taken


@given(skip=st.integers(0, 5), num_threads=st.integers(1, 6))
def test_many_threads_take_an_order_once(tmp_path_factory, skip, num_threads):
    ready_file = tmp_path_factory.mktemp("order") / READY_FILE
    taken = []

    class Counting(Trap):
        def _fail(self, number):
            taken.append(number)

    trap = Counting(fault_file(ready_file), [os.getpid()])
    FaultOrder.give(ready_file, Fault(FaultStage.QUEUED, signal.SIGSTOP, skip=skip))

    def visit():
        for _ in range(skip + 2):
            trap.reach(FaultStage.QUEUED)

    threads = [threading.Thread(target=visit) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [signal.SIGSTOP]


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        ([(0, 0, 0, 0, 10)], [(0, 0, 0, 0, 5)], [(0, 5, 0, 5, 5)]),
        ([(0, i, 0, i, 1) for i in range(4)], [(0, i, 0, i, 1) for i in (0, 1)], [(0, i, 0, i, 1) for i in (2, 3)]),
        ([(0, 0, 0, 0, 1)], [], [(0, 0, 0, 0, 1)]),
        ([], [], []),
    ],
    ids=["one copy", "several", "one byte", "none"],
)
def test_half_of_the_bytes_are_moved_when_the_stage_is_met(rows, first, second):
    met = []

    def move(sock, copies, *more, **head):
        met.append((copies.tolist(), more, head))

    _halved(move, met.append)("socket", copy_table(rows), "memory", head=b"head")
    assert met == [(first, ("memory",), {"head": b"head"}), FaultStage.MID_TRANSFER, (second, ("memory",), {})]
    met.clear()

    def write(end, ticket_id, copies, deadline):
        met.append((end, ticket_id, copies.tolist(), deadline))

    _halved(write, met.append, at=2)("end", 7, copy_table(rows), "deadline")
    assert met == [("end", 7, first, "deadline"), FaultStage.MID_TRANSFER, ("end", 7, second, "deadline")]


def test_every_stage_is_a_method_of_a_worker():
    program = "from splitserve.tools.chaos.faults import install; install(print)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
