"""The production wiring in one process: manager threads, ZeroMQ, the bootstrap server and TCP."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from splitserve.core.clock import SystemClock
from splitserve.core.config import ClusterToken, DisaggregationConfig
from splitserve.core.layout import Region
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.process.threads import Waker
from splitserve.transfer.bootstrap import KVBootstrapServer
from splitserve.transfer.control import ManagerThread, ZmqChannel
from splitserve.transfer.decode_manager import DecodeManager
from splitserve.transfer.directory import HttpDirectory, register_rank
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.metadata import MetadataBuffers, MetadataRow
from splitserve.transfer.pending import HANDSHAKE_SECONDS, MAX_PENDING_PER_ADDRESS
from splitserve.transfer.prefill_manager import PrefillManager
from splitserve.transfer.room import Context
from splitserve.transfer.state import KVPoll
from splitserve.transfer.transports import create_transport
from splitserve.transfer.transports.base import TransportOptions
from splitserve.transfer.wire import KVArgs
from support.kv_world import layout

DEADLINE = 60.0
NUM_ROWS = 64
TOKEN = b"the token of this cluster"


class Worker:
    def __init__(self, role, token=TOKEN):
        self.layout = layout(256, page_size=16, layers=4, heads=3)
        self.pages = [np.zeros((256, component.page_bytes(16)), dtype=np.uint8) for component in self.layout.components]
        self.metadata = MetadataBuffers(NUM_ROWS)
        self.changed = threading.Event()
        self.waker = Waker()
        self.channel = ZmqChannel("127.0.0.1", token)
        self.transport = create_transport("tcp", TransportOptions(token=token, on_progress=self.waker.wake))
        self.transport.register([Region(p.ctypes.data, p.nbytes) for p in self.pages] + [self.metadata.region()])
        self.directory = HttpDirectory(self.waker.wake, token)
        context = Context(
            clock=SystemClock(),
            mailbox=Mailbox(self.channel),
            transport=self.transport,
            args=KVArgs(
                backend="tcp",
                model="tiny",
                layout=self.layout,
                metadata_row_bytes=self.metadata.row_bytes,
                num_metadata_rows=NUM_ROWS,
            ),
            config=DisaggregationConfig(cluster_token=ClusterToken(token)),
            metadata=self.metadata,
            wake=self.waker.wake,
        )
        is_prefill = role is DisaggregationMode.PREFILL
        self.kv = PrefillManager(context) if is_prefill else DecodeManager(context, self.directory)
        self.thread = ManagerThread(self.kv, self.channel, self.waker, self.changed.set)
        self.thread.start()

    def wait(self, port, *states):
        end = time.monotonic() + DEADLINE
        while port.poll() not in states:
            self.changed.wait(0.05)
            self.changed.clear()
            assert time.monotonic() < end, f"still {port.poll().name}"
        return port.poll()

    def close(self):
        self.thread.close()
        self.thread.close()
        self.transport.close()
        self.directory.close()
        self.waker.close()


@pytest.fixture
def token():
    return TOKEN


@pytest.fixture
def pair(token):
    server = KVBootstrapServer("127.0.0.1", 0, token)
    server.run()
    prefill, decode = Worker(DisaggregationMode.PREFILL, token), Worker(DisaggregationMode.DECODE, token)
    register_rank("127.0.0.1", server.port, prefill.kv.prefill_info(), token, timeout=DEADLINE)
    yield prefill, decode, server.port
    for part in (prefill, decode, server):
        part.close()


def test_pages_travel_end_to_end_for_many_rooms_at_once(pair):
    prefill, decode, port = pair
    rng = np.random.default_rng(0)
    for component in prefill.pages:
        component[:] = rng.integers(0, 256, component.shape, dtype=np.uint8)
    order = rng.permutation(256).reshape(32, 8).tolist()
    rooms = []
    for room in range(32):
        info = BootstrapInfo("127.0.0.1", port, RoomKey(room))
        rooms.append((prefill.kv.sender(f"p{room}", info), decode.kv.receiver(f"d{room}", info)))
    for room, (_, receiver) in enumerate(rooms):
        decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.init(order[room], room, num_tokens=128)
    for room, (sender, _) in enumerate(rooms):
        prefill.wait(sender, KVPoll.WAITING_FOR_INPUT)
        own = list(range(room * 8, room * 8 + 8))
        sender.send(own[:5], is_last=False)
        prefill.metadata.set_buf(room, MetadataRow(RoomKey(room), 1000 + room))
        sender.send(own[5:], is_last=True, metadata_index=room)
    for room, (sender, receiver) in enumerate(rooms):
        assert decode.wait(receiver, KVPoll.SUCCESS, KVPoll.FAILED) is KVPoll.SUCCESS
        assert prefill.wait(sender, KVPoll.SUCCESS, KVPoll.FAILED) is KVPoll.SUCCESS
        assert decode.metadata.get_buf(room, RoomKey(room)).output_id == 1000 + room
        assert sender.stats().num_bytes == 8 * prefill.layout.bytes_per_page + prefill.metadata.row_bytes
        for a, b in zip(prefill.pages, decode.pages, strict=True):
            assert (a[room * 8 : room * 8 + 8] == b[order[room]]).all()
        sender.clear()
        receiver.clear()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_is_sent_to_the_other_side(pair, side):
    prefill, decode, port = pair
    info = BootstrapInfo("127.0.0.1", port, RoomKey(1))
    sender, receiver = prefill.kv.sender("p", info), decode.kv.receiver("d", info)
    decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
    receiver.init([1, 2], 0, num_tokens=32)
    prefill.wait(sender, KVPoll.WAITING_FOR_INPUT)
    (sender if side == "prefill" else receiver).abort("changed my mind")
    other, worker = (receiver, decode) if side == "prefill" else (sender, prefill)
    assert worker.wait(other, KVPoll.FAILED) is KVPoll.FAILED
    assert "changed my mind" in other.failure().message


def test_a_worker_that_closes_fails_its_peers_rooms_at_once(pair):
    prefill, decode, port = pair
    info = BootstrapInfo("127.0.0.1", port, RoomKey(1))
    prefill.kv.sender("p", info)
    receiver = decode.kv.receiver("d", info)
    decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
    receiver.init([1, 2], 0, num_tokens=32)
    prefill.thread.close()
    decode.wait(receiver, KVPoll.FAILED)
    end = time.monotonic() + DEADLINE
    while not receiver.quiescent() and time.monotonic() < end:
        decode.changed.wait(0.05)
    assert receiver.quiescent()
    assert "shutting down" in receiver.failure().message


def test_a_bug_in_the_manager_fails_the_open_rooms_and_the_thread_goes_on(pair, monkeypatch, caplog):
    _, decode, port = pair
    broken = decode.kv.receiver("a", BootstrapInfo("127.0.0.1", port, RoomKey(1)))
    tick = decode.kv.tick

    def fail_once():
        monkeypatch.setattr(decode.kv, "tick", tick)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(decode.kv, "tick", fail_once)
    decode.waker.wake()
    decode.wait(broken, KVPoll.FAILED)
    assert "a bug" in broken.failure().message
    assert "the KV manager failed" in caplog.text
    after = decode.kv.receiver("b", BootstrapInfo("127.0.0.1", port, RoomKey(2)))
    decode.wait(after, KVPoll.WAITING_FOR_INPUT)


@pytest.fixture(params=[b"", b"the token of another cluster"])
def stranger(request):
    worker = Worker(DisaggregationMode.DECODE, request.param)
    yield worker
    worker.close()


def test_another_token_fails_the_room_at_once_and_says_what_to_do(pair, stranger):
    _, _, port = pair
    receiver = stranger.kv.receiver("d", BootstrapInfo("127.0.0.1", port, RoomKey(1)))
    stranger.wait(receiver, KVPoll.FAILED)
    remedy = "the cluster tokens differ, or one side has none: start all workers with the same --cluster-token-file"
    assert remedy in receiver.failure().message


def test_a_peer_without_the_token_sends_no_message_even_if_it_knows_the_address(pair, stranger):
    prefill, decode, port = pair
    stranger.kv._directory = Told([prefill.kv.prefill_info()])
    own = stranger.kv.receiver("x", BootstrapInfo("127.0.0.1", port, RoomKey(1)))
    # Peers that hold the token are served, before and after its attempts.
    for room in (2, 3):
        receiver = decode.kv.receiver(f"d{room}", BootstrapInfo("127.0.0.1", port, RoomKey(room)))
        decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
    assert own.poll() is KVPoll.BOOTSTRAPPING
    assert prefill.kv.num_peers == 1
    assert prefill.kv.num_undecodable == 0


class Told:
    """A directory with one answer."""

    def __init__(self, info):
        self.info = info

    def request(self, address, timeout):
        """Nothing to look up."""

    def result(self, address):
        return self.info


class Flood:
    """Silent connections, `rate` per second, to each of some ports."""

    def __init__(self, ports, rate):
        self._ports, self._rate = ports, rate
        self._sockets = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def _run(self):
        while not self._is_over.wait(1 / self._rate):
            for port in self._ports:
                with contextlib.suppress(OSError):
                    self._sockets.append(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))

    def wait(self, count):
        end = time.monotonic() + DEADLINE
        while len(self._sockets) < count:
            assert time.monotonic() < end
            time.sleep(0.01)

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join(DEADLINE)
        for sock in self._sockets:
            sock.close()


@pytest.mark.parametrize("token", [TOKEN, b""], ids=["with a token", "without a token"])
# At the lower rate as many as come within the time of a handshake are pending, at the higher one as many as may be.
@pytest.mark.parametrize(("rate", "count"), [(60, 1.2 * 60 * HANDSHAKE_SECONDS), (400, 1.5 * MAX_PENDING_PER_ADDRESS)])
def test_a_restarted_prefill_pairs_at_once_among_silent_connections(pair, token, rate, count):
    prefill, decode, port = pair
    ports = [port, int(decode.transport._listener.endpoint.rpartition(":")[2])]
    ports += [int(worker.channel.address.rpartition(":")[2]) for worker in (prefill, decode)]
    restarted = Worker(DisaggregationMode.PREFILL, token)
    try:
        with Flood(ports, rate) as flood:
            flood.wait(len(ports) * count)
            register_rank("127.0.0.1", port, restarted.kv.prefill_info(), token, timeout=DEADLINE)
            info = BootstrapInfo("127.0.0.1", port, RoomKey(7))
            sender, receiver = restarted.kv.sender("p", info), decode.kv.receiver("d", info)
            decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
            receiver.init([3], 0, num_tokens=16)
            restarted.wait(sender, KVPoll.WAITING_FOR_INPUT)
            restarted.metadata.set_buf(0, MetadataRow(RoomKey(7), 1))
            sender.send([5], is_last=True, metadata_index=0)
            assert decode.wait(receiver, KVPoll.SUCCESS, KVPoll.FAILED) is KVPoll.SUCCESS
    finally:
        restarted.close()
