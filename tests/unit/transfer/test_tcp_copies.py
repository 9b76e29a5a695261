"""Copy tables through a socket, in C and by numpy, against bytes joined one by one."""

import gc
import signal
import socket
import sys
import threading
import weakref

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import tcp
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.sockets import Deadline, receive_exactly, set_receive_timeout
from splitserve.transfer.transports.tcp import MAX_PIECES_PER_CALL, receive_copies, send_copies

DEADLINE = 60.0
NUM_BYTES = 1 << 16


# Of the module: hypothesis draws many examples within one test.
@pytest.fixture(scope="module", params=["native", "numpy"])
def way(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(tcp, "_library", None)
        elif tcp._library is None:
            pytest.skip("installed without a C compiler")
        yield


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class Regions:
    """Two regions of counting bytes, in one of them a few other ones."""

    def __init__(self, is_empty=False):
        self.arrays = [np.zeros(NUM_BYTES, np.uint8) for _ in range(2)]
        if not is_empty:
            self.arrays[0][:] = np.arange(NUM_BYTES) % 251
            self.arrays[1][:] = np.arange(NUM_BYTES) % 241
        self.memory = Memory([Region(a.ctypes.data, NUM_BYTES) for a in self.arrays])

    def joined(self, rows):
        return b"".join(self.arrays[r][o : o + n].tobytes() for r, o, _, _, n in rows)


def in_a_thread(function, *args, **more):
    thread = threading.Thread(target=function, args=args, kwargs=more, daemon=True)
    thread.start()
    return thread


def spread(lengths, regions):
    """Rows with targets in order, one byte between them, and sources in reverse order."""
    rows, at = [], 0
    for length, region in zip(lengths, regions, strict=True):
        rows.append((region, NUM_BYTES - at - length, 1 - region, at, length))
        at += length + 1
    return rows


SOME = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1)), max_size=40)


@given(some=SOME, head=st.binary(max_size=50), max_bytes=st.integers(1, 700))
@example(some=[(3, i % 2) for i in range(3 * MAX_PIECES_PER_CALL + 1)], head=b"head", max_bytes=1 << 20)
@example(some=[(NUM_BYTES - 1, 0)], head=b"", max_bytes=1000)
@example(some=[(0, 0), (0, 1)], head=b"", max_bytes=1000)
@example(some=[(0, 0), (5, 1), (0, 1)], head=b"", max_bytes=5)
def test_what_is_sent_is_the_head_and_the_sources_and_arrives_at_the_targets(way, some, head, max_bytes):
    rows = spread([n for n, _ in some], [r for _, r in some])
    here, there, expected = Regions(), Regions(is_empty=True), Regions(is_empty=True)
    for r, o, to, at, n in rows:
        expected.arrays[to][at : at + n] = here.arrays[r][o : o + n]
    ours, theirs = socket.socketpair()
    copies = copy_table(rows)
    with ours, theirs:
        sending = in_a_thread(send_copies, ours, copies, here.memory, max_bytes, Deadline(DEADLINE), head=head)
        set_receive_timeout(theirs, DEADLINE)
        got = theirs.recv(len(head), socket.MSG_WAITALL) if head else b""
        receive_copies(theirs, copies, there.memory)
        sending.join(DEADLINE)
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(1) == b""
    assert got == head
    for array, wanted in zip(there.arrays, expected.arrays, strict=True):
        assert (array == wanted).all()


def test_rows_that_do_not_lie_together_are_taken_as_they_are(way, pair):
    here, rows = Regions(), spread([100, 200, 300, 400], [0, 1, 0, 1])
    send_copies(pair[0], copy_table(rows)[::2], here.memory, 1 << 20, Deadline(DEADLINE))
    assert pair[1].recv(1000) == here.joined(rows[::2])


@pytest.mark.skipif(sys.platform != "linux", reason="no sockets that keep messages apart")
def test_a_call_of_the_kernel_takes_the_head_and_so_many_bytes_even_inside_a_piece(way):
    here, rows = Regions(), spread([10, 90, 250, 7], [0, 0, 1, 0])
    # Of these sockets each call is a message.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_copies(ours, copy_table(rows), here.memory, 100, Deadline(DEADLINE), head=b"12")
        ours.shutdown(socket.SHUT_WR)
        messages = list(iter(lambda: theirs.recv(1000), b""))
    assert b"".join(messages) == b"12" + here.joined(rows)
    assert [len(m) for m in messages] == [102, 100, 100, 57]


def test_a_peer_that_does_not_read_is_late(way, pair):
    here, rows = Regions(), [(0, 0, 0, 0, NUM_BYTES)] * 100
    with pytest.raises(TimeoutError):
        send_copies(pair[0], copy_table(rows), here.memory, 1 << 20, Deadline(0.05))


def test_after_the_deadline_nothing_is_sent(way, pair):
    here = Regions()
    with pytest.raises(TimeoutError):
        send_copies(pair[0], copy_table([(0, 0, 0, 0, 10)]), here.memory, 1 << 20, Deadline(-1.0))
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


def test_a_peer_that_has_gone_is_an_error_and_no_signal(way, pair):
    here = Regions()
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        send_copies(pair[0], copy_table([(0, 0, 0, 0, 10)]), here.memory, 1 << 20, Deadline(DEADLINE))


def test_a_connection_that_ends_before_the_last_byte_says_so(way, pair):
    there = Regions(is_empty=True)
    pair[0].sendall(b"12345")
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed inside a write"):
        receive_copies(pair[1], copy_table([(0, 0, 0, 0, 3), (0, 0, 1, 0, 3)]), there.memory)
    assert there.arrays[0][:3].tobytes() == b"123"
    assert there.arrays[1][:2].tobytes() == b"45"


def test_a_receive_timeout_of_the_socket_counts(way, pair):
    there = Regions(is_empty=True)
    set_receive_timeout(pair[1], 0.01)
    with pytest.raises(TimeoutError):
        receive_copies(pair[1], copy_table([(0, 0, 0, 0, 3)]), there.memory)


@pytest.fixture
def interrupt():
    """A signal to this thread, whatever it waits for."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    me = threading.get_ident()
    yield lambda: signal.pthread_kill(me, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_signals_neither_end_nor_spoil_what_is_under_way(way, pair, interrupt):
    here, there = Regions(), Regions(is_empty=True)
    copies = copy_table((0, at, 0, at, 64) for at in range(0, NUM_BYTES, 64))

    def send_with_signals():
        # Time enough to be woken without a byte.
        for _ in range(1000):
            interrupt()
        for part in np.array_split(copies, 100):
            interrupt()
            send_copies(pair[0], part, here.memory, 100, Deadline(DEADLINE))

    sending = in_a_thread(send_with_signals)
    set_receive_timeout(pair[1], DEADLINE)
    receive_copies(pair[1], copies, there.memory)
    sending.join(DEADLINE)
    assert (there.arrays[0] == here.arrays[0]).all()
    sending = in_a_thread(send_with_signals)
    assert receive_exactly(pair[1], NUM_BYTES) == here.arrays[0].tobytes()
    sending.join(DEADLINE)


def test_signals_do_not_end_a_send(way, pair, interrupt):
    here, there = Regions(), Regions(is_empty=True)
    copies = copy_table([(0, 0, 0, 0, NUM_BYTES)] * 20)

    def receive_with_signals():
        for _ in range(1000):
            interrupt()
        for row in copies:
            interrupt()
            receive_copies(pair[1], row[None], there.memory)

    receiving = in_a_thread(receive_with_signals)
    send_copies(pair[0], copies, here.memory, 1 << 20, Deadline(DEADLINE))
    receiving.join(DEADLINE)
    assert not receiving.is_alive()
    assert (there.arrays[0] == here.arrays[0]).all()


def test_regions_that_are_added_meanwhile_change_nothing(way, pair):
    here, there = Regions(), Regions(is_empty=True)
    rows = [(0, 0, 0, 0, NUM_BYTES), (1, 0, 1, 0, NUM_BYTES)]
    bases = weakref.ref(there.memory.bases)
    # What it holds is less than the first row: when that is sent, the other side is at it.
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    receiving = in_a_thread(receive_copies, pair[1], copy_table(rows), there.memory)
    send_copies(pair[0], copy_table(rows[:1]), here.memory, 1000, Deadline(DEADLINE))
    there.memory.add([Region(0, 0)])
    gc.collect()
    assert tcp._library is None or bases() is not None
    send_copies(pair[0], copy_table(rows[1:]), here.memory, 1000, Deadline(DEADLINE))
    receiving.join(DEADLINE)
    assert (there.arrays[1] == here.arrays[1]).all()
