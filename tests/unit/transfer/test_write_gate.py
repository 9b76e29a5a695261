"""The fence of shared memory: who may begin, and when the last one is proven to be over."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.same_host import GateKey, WriteGate

DEADLINE = 60.0
# Opens a gate through the descriptor it inherits, enters and reports so; leaves at a line on its standard input.
HOLDER = """
import sys
from splitserve.transfer.transports.same_host import GateKey
with GateKey(int(sys.argv[1])).held():
    print("inside", flush=True)
    sys.stdin.readline()
print("outside", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def gate():
    return WriteGate()


@pytest.fixture
def key(gate):
    key = GateKey(gate.fd)
    yield key
    key.close()


@pytest.fixture
def holder(gate):
    """A process that is inside the gate."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(gate.fd)],
        pass_fds=[gate.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "inside\n"
    yield process
    process.kill()
    process.wait(DEADLINE)
    process.stdin.close()
    process.stdout.close()


def until(is_true):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        time.sleep(0.001)


def test_an_open_gate_lets_writes_in_again_and_again_and_is_no_fence(gate, key):
    for _ in range(3):
        with key.held():
            assert not gate.is_closed()
    assert not gate.is_closed()


def test_a_closed_gate_with_nobody_inside_is_a_fence_at_once_and_for_good(gate, key):
    gate.close_for_good()
    gate.close_for_good()
    assert gate.is_closed()
    for _ in range(2):
        with pytest.raises(WriteRefused, match="drained"), key.held():
            raise AssertionError("it came in")
    assert gate.is_closed()


def test_whoever_is_inside_holds_the_fence_up_and_does_not_come_in_again(gate, key):
    with key.held():
        gate.close_for_good()
        assert not gate.is_closed()
    with pytest.raises(WriteRefused), key.held():
        raise AssertionError("it came in")
    assert gate.is_closed()


def test_a_gate_that_closes_keeps_others_out_while_one_is_still_inside(gate, key):
    other = GateKey(gate.fd)
    with key.held():
        gate.close_for_good()
        with pytest.raises(WriteRefused), other.held():
            raise AssertionError("it came in")
        assert not gate.is_closed()
    assert gate.is_closed()
    other.close()


def test_a_refused_key_leaves_no_lock_behind(gate, key):
    gate.close_for_good()
    with pytest.raises(WriteRefused), key.held():
        raise AssertionError("it came in")
    assert gate.is_closed()


def test_a_gate_that_is_gone_stays_closed_for_its_keys():
    """The receiver's descriptor, and its lock with it, may go before the sender notices."""
    gate = WriteGate()
    key = GateKey(gate.fd)
    gate.close_for_good()
    assert gate.is_closed()
    del gate
    with pytest.raises(WriteRefused), key.held():
        raise AssertionError("it came in")
    key.close()


def descriptors_of(gate):
    """Number of descriptors of the gate's file. Threads of other tests open files of their own."""
    file, found = os.fstat(gate.fd), 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.samestat(os.stat(f"/proc/self/fd/{fd}"), file)
    return found


def test_a_key_that_is_closed_leaves_nothing_open(gate):
    key = GateKey(gate.fd)
    with key.held():
        assert descriptors_of(gate) > 1
    key.close()
    key.close()
    assert descriptors_of(gate) == 1


def test_a_failure_inside_lets_go(gate, key):
    with pytest.raises(ZeroDivisionError), key.held():
        raise ZeroDivisionError
    gate.close_for_good()
    assert gate.is_closed()


def test_a_process_killed_inside_lets_go(gate, holder):
    gate.close_for_good()
    assert not gate.is_closed()
    holder.kill()
    holder.wait(DEADLINE)
    until(gate.is_closed)


def test_a_process_stopped_inside_holds_the_fence_up_until_it_goes_on(gate, holder):
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
    gate.close_for_good()
    assert not gate.is_closed()
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert not gate.is_closed()
    holder.send_signal(signal.SIGCONT)
    assert holder.stdout.readline() == "outside\n"
    assert gate.is_closed()
