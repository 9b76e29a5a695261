"""Publisher and subscriber over real sockets: order, replay, gaps that only the whole index closes, restarts."""

import asyncio
import contextlib
import json
import re
import struct
import threading
import time

import pytest
import zmq

from splitserve.core.errors import ConfigError
from splitserve.core.kv_events import KVEventsConfig
from splitserve.observe.events import subscriber as subscriber_module
from splitserve.observe.events.publisher import (
    EventPublisherFactory,
    NullEventPublisher,
    ZmqEventPublisher,
    check_config,
    is_bound,
    offset_endpoint_port,
)
from splitserve.observe.events.schema import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    IndexSnapshot,
    decode,
)
from splitserve.observe.events.subscriber import KVEventSubscriber, Sequencer, Verdict

DEADLINE = 60.0
ANY = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a publisher's thread may need more than the usual time for a replay."""
    monkeypatch.setattr(subscriber_module, "_REPLAY_TIMEOUT", DEADLINE)


def kv_events_config(text):
    return KVEventsConfig.from_cli(text, "--kv-events-config")


def block(i):
    return BlockStored([i], None, [i, i], 2)


@pytest.fixture
def publisher():
    """Makes publishers on free ports, and ends them all."""
    made = []

    def make(**options):
        made.append(ZmqEventPublisher(0, ANY, ANY, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


class Worker:
    """A publisher and the index that it publishes."""

    def __init__(self, publisher):
        self.publisher = publisher
        self.held = BlockIndex()

    def tell(self, *events):
        for event in events:
            self.held.apply(event)
        self.publisher.publish(events)

    async def snapshot(self):
        return IndexSnapshot(self.publisher.next_sequence, time.time(), list(self.held.as_events()))


@contextlib.asynccontextmanager
async def following(worker, **options):
    made = {"replay_endpoint": worker.publisher.replay_endpoint, "load_index": worker.snapshot, **options}
    subscriber = KVEventSubscriber(worker.publisher.endpoint, **made)
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(is_true, nudge=lambda: None):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        nudge()
        await asyncio.sleep(0.01)


async def agree(subscriber, worker):
    """Until the subscriber holds what the worker holds. A further event shows it what it missed.

    Meanwhile the worker takes turns in which nothing changes.
    """
    worker.tell(block(-1))
    await until(lambda: subscriber.index.blocks() == worker.held.blocks(), nudge=worker.tell)


def test_three_frames_with_the_number_in_network_order(publisher):
    events = publisher(topic="kv@pod@model")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        socket.setsockopt(zmq.RCVTIMEO, 50)
        socket.connect(events.endpoint)
        frames = None
        for i in range(int(DEADLINE / 0.05)):
            events.publish([block(i)])
            with contextlib.suppress(zmq.Again):
                frames = socket.recv_multipart()
                break
        topic, number, payload = frames
        assert topic == b"kv@pod@model"
        (sequence,) = struct.unpack(">Q", number)
        assert decode(payload).events == [block(sequence)]
        assert decode(payload).dp_rank == 0


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ], ids=["dealer", "req"])
def test_a_replay_brings_what_is_kept_from_a_number_on_and_ends(publisher, kind):
    events = publisher(buffer_steps=3)
    for i in range(5):
        events.publish([block(i)])
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE * 1000))
        socket.connect(events.replay_endpoint)
        answers = []
        # The thread may not have sent all of them yet.
        while len(answers) < 2 or answers[-2][-2:-1] != [struct.pack(">Q", 4)]:
            socket.send((3).to_bytes(8, "big"))
            answers = [socket.recv_multipart()]
            if kind is zmq.REQ:
                # Such a socket takes one answer to a question.
                if answers[0][1] == struct.pack(">Q", 3):
                    return
                continue
            while answers[-1][-2] != struct.pack(">q", -1):
                answers.append(socket.recv_multipart())
    assert [decode(payload).events for *_, payload in answers[:-1]] == [[block(3)], [block(4)]]
    assert answers[-1] == [b"", struct.pack(">q", -1), b""]


def test_a_whole_buffer_is_replayed_to_a_client_that_is_slow_to_read(publisher):
    events = publisher(buffer_steps=5000)
    for i in range(5000):
        events.publish([block(i)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE * 1000))
        # Of what ZMQ holds for it here: far less than the answer.
        socket.setsockopt(zmq.RCVHWM, 10)
        socket.connect(events.replay_endpoint)
        # The thread answers when all before is sent.
        wait_until_sent(events)
        socket.send((0).to_bytes(8, "big"))
        numbers = []
        while (frames := socket.recv_multipart())[-2] != struct.pack(">q", -1):
            numbers.append(int.from_bytes(frames[-2], "big"))
    assert numbers == list(range(5000))


def wait_until_sent(publisher):
    limit = time.monotonic() + DEADLINE
    while len(publisher._sent) < publisher.next_sequence:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_that_batches_were_lost_shows_as_soon_as_there_is_room(publisher, monkeypatch):
    events = publisher(max_queue_size=1)
    inside, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(events, "_answer_replays", lambda: inside.set() or go_on.wait(DEADLINE))
    # From here on the thread takes nothing from the queue.
    assert inside.wait(DEADLINE)
    for i in range(5):
        events.publish([block(i)])
    lost = events.next_sequence
    events.publish([])
    # There is no room for it, and no second number.
    assert lost == events.next_sequence == 5
    go_on.set()
    limit = time.monotonic() + DEADLINE
    while events.next_sequence == lost:
        assert time.monotonic() < limit
        events.publish([])
        time.sleep(0.01)
    events.publish([])
    assert events.next_sequence == lost + 1
    while events._sent[-1][0] != lost:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert decode(events._sent[-1][1]).events == []
    assert len(events._sent) < lost


def test_by_option_a_replay_is_without_the_topic(publisher):
    events = publisher(topic="kv", replay_topic=False)
    events.publish([block(0)])
    wait_until_sent(events)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE * 1000))
        socket.connect(events.replay_endpoint)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        empty, number, payload = socket.recv_multipart()
        assert (empty, number) == (b"", struct.pack(">Q", 0))
        assert decode(payload).events == [block(0)]
        assert socket.recv_multipart() == [b"", struct.pack(">q", -1), b""]


async def test_a_subscriber_holds_what_the_worker_holds(publisher):
    worker = Worker(publisher())
    worker.tell(block(1), block(2))
    async with following(worker) as subscriber:
        await until(lambda: subscriber.num_loads == 1)
        worker.tell(block(3))
        worker.tell(BlockRemoved([1]))
        await agree(subscriber, worker)
        assert set(subscriber.index.blocks()) == {2, 3, -1}
        worker.tell(AllBlocksCleared())
        await until(lambda: not subscriber.index.blocks())


async def test_ten_thousand_blocks_through_evictions_and_lost_messages(publisher, monkeypatch):
    worker = Worker(publisher())
    lost = []
    send = worker.publisher._pub.send_multipart

    def forgetful(frames):
        # Every 97th message is lost on its way, but kept for replay.
        if int.from_bytes(frames[1], "big") % 97 == 96:
            lost.append(frames[1])
        else:
            send(frames)

    monkeypatch.setattr(worker.publisher, "_pub", type("Pub", (), {"send_multipart": staticmethod(forgetful)})())
    async with following(worker) as subscriber:
        await until(lambda: subscriber.num_loads == 1)
        for i in range(10_000):
            worker.tell(*([block(i), BlockRemoved([i - 50])] if i >= 50 else [block(i)]))
            if i % 100 == 0:
                await asyncio.sleep(0)
        await agree(subscriber, worker)
        assert len(lost) > 90
        assert subscriber.num_replays > 0
        assert subscriber.num_loads == 1


async def test_what_the_replay_no_longer_has_is_loaded_whole(publisher, monkeypatch):
    worker = Worker(publisher(buffer_steps=2))
    async with following(worker) as subscriber:
        await until(lambda: subscriber.num_loads == 1)
        with monkeypatch.context() as patch:
            patch.setattr(worker.publisher, "_pub", type("Pub", (), {"send_multipart": staticmethod(lambda f: None)})())
            for i in range(20):
                worker.tell(block(i))
            await until(worker.publisher._queue.empty)
        await agree(subscriber, worker)
        assert subscriber.num_loads == 2


async def test_a_subscriber_that_receives_nothing_loads_what_the_replay_no_longer_has(publisher):
    worker, silent = Worker(publisher(buffer_steps=2)), publisher()
    how = {"replay_endpoint": worker.publisher.replay_endpoint, "load_index": worker.snapshot, "quiet_seconds": 0.05}
    subscriber = KVEventSubscriber(silent.endpoint, **how)
    task = asyncio.create_task(subscriber.run())
    try:
        await until(lambda: subscriber.num_loads == 1)
        for i in range(20):
            worker.tell(block(i))
        await until(lambda: subscriber.index.blocks() == worker.held.blocks())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_overrun_queue_loses_batches_and_the_index_heals_it(publisher, monkeypatch, caplog):
    worker = Worker(publisher(max_queue_size=1, buffer_steps=1))
    async with following(worker) as subscriber:
        await until(lambda: subscriber.num_loads == 1)
        for i in range(500):
            worker.tell(block(i))
        await agree(subscriber, worker)
    assert caplog.text.count("the queue is full") <= 1


async def test_a_worker_that_started_again_is_loaded_anew(publisher):
    old, new = Worker(publisher()), Worker(publisher())
    sides = [old]

    async def snapshot():
        return await sides[0].snapshot()

    for i in range(5):
        old.tell(block(i))
    async with following(old, load_index=snapshot) as subscriber:
        await agree(subscriber, old)
        sides[0] = new
        new.tell(block(100))
        await subscriber._take(zmq.asyncio.Context.instance(), 0, EventBatch.now([block(100)], 0))
        assert set(subscriber.index.blocks()) == {100}


async def test_numbers_of_another_publisher_are_not_taken_for_what_was_missed(publisher):
    old, new = Worker(publisher()), Worker(publisher())
    old.tell(block(1))
    old.tell(block(2))
    subscriber = KVEventSubscriber(old.publisher.endpoint, new.publisher.replay_endpoint)
    await subscriber._take(None, 0, EventBatch.now([block(1)], 0))
    await subscriber._take(None, 1, EventBatch.now([block(2)], 0))
    # The worker started again, and has published more than before by now.
    for i in range(10, 15):
        new.tell(block(i))
    await until(lambda: len(new.publisher._sent) == 5)
    await subscriber._ask_for_news(zmq.asyncio.Context.instance())
    await subscriber._ask_for_news(zmq.asyncio.Context.instance())
    assert set(subscriber.index.blocks()) == {10, 11, 12, 13, 14}


async def test_a_publisher_that_has_published_nothing_is_another_one(publisher):
    old, new = Worker(publisher()), Worker(publisher())
    subscriber = KVEventSubscriber(old.publisher.endpoint, new.publisher.replay_endpoint, load_index=new.snapshot)
    await subscriber._take(None, 0, EventBatch.now([block(1)], 0))
    await subscriber._ask_for_news(zmq.asyncio.Context.instance())
    assert not subscriber.index.blocks()
    # Nothing is new there.
    await subscriber._ask_for_news(zmq.asyncio.Context.instance())
    assert subscriber.num_loads == 1


async def test_what_was_lost_last_is_asked_for_when_nothing_comes(publisher, monkeypatch):
    worker = Worker(publisher())
    async with following(worker, quiet_seconds=0.05) as subscriber:
        await agree(subscriber, worker)
        with monkeypatch.context() as patch:
            patch.setattr(worker.publisher, "_pub", type("Pub", (), {"send_multipart": staticmethod(lambda f: None)})())
            worker.tell(block(7))
            await until(lambda: len(worker.publisher._sent) == worker.publisher.next_sequence)
        await until(lambda: subscriber.index.blocks() == worker.held.blocks())


async def test_without_an_index_to_load_a_gap_empties_what_is_known(publisher, monkeypatch):
    worker = Worker(publisher())
    subscriber = KVEventSubscriber(worker.publisher.endpoint)
    await subscriber._take(None, 0, EventBatch.now([block(1)], 0))
    await subscriber._take(None, 5, EventBatch.now([block(6)], 0))
    assert set(subscriber.index.blocks()) == {6}
    assert subscriber.next_sequence == 6


def test_what_a_snapshot_includes_is_old_and_a_smaller_number_of_later_is_a_restart():
    order = Sequencer()
    assert [order.judge(n, 1.0) for n in (0, 1)] == [Verdict.NEXT, Verdict.GAP]
    order.begin_at(10, 50.0)
    assert order.judge(7, 49.0) is Verdict.OLD
    assert order.judge(0, 51.0) is Verdict.RESTART
    order.advance(10, 52.0)
    assert order.judge(11, 51.0) is Verdict.NEXT
    assert order.judge(3, 52.0) is Verdict.OLD


def test_each_rank_has_a_port_of_its_own():
    assert offset_endpoint_port("tcp://*:5557", 3) == "tcp://*:5560"
    assert offset_endpoint_port("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert offset_endpoint_port("inproc://cache", 2) == "inproc://cache_dp2"
    assert offset_endpoint_port("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:*"
    one = ZmqEventPublisher(0, "tcp://*:0")
    one.shutdown()
    assert re.fullmatch(r"tcp://\*:\d+", one.endpoint)
    with pytest.raises(ConfigError, match="no port"):
        offset_endpoint_port("tcp://somewhere", 0)


def test_the_publisher_is_chosen_by_name():
    assert isinstance(EventPublisherFactory.create(KVEventsConfig()), NullEventPublisher)
    made = EventPublisherFactory.create(kv_events_config(f'{{"publisher": "zmq", "endpoint": "{ANY}"}}'))
    made.shutdown()
    assert isinstance(made, ZmqEventPublisher)
    with pytest.raises(ConfigError, match="no publisher 'pigeon', only null, zmq"):
        EventPublisherFactory.create(KVEventsConfig(publisher="pigeon"))
    with pytest.raises(ValueError, match="already"):
        EventPublisherFactory.register_publisher("zmq", lambda config, rank: NullEventPublisher())


@pytest.mark.parametrize("text", ["", "[]", '{"publisher": 1}', '{"port": 1}', '{"buffer_steps": 0}'])
def test_a_configuration_that_says_nonsense_is_refused(text):
    with pytest.raises(ConfigError, match="--kv-events-config"):
        kv_events_config(text)


def test_an_address_in_use_is_an_error_of_the_configuration(publisher):
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqEventPublisher(0, publisher().endpoint.replace("127.0.0.1", "*"))


def test_a_publisher_connects_to_an_endpoint_without_a_wildcard():
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": None}
    one = EventPublisherFactory.create(kv_events_config(json.dumps(config)))
    try:
        assert (one.endpoint, one.replay_endpoint) == ("", "")
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end and not subscriber.poll(50):
            # A PUB socket drops what it sends before the subscription has arrived.
            one.publish([block(1)])
        assert decode(subscriber.recv_multipart()[2]).events == [block(1)]
    finally:
        one.shutdown()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://127.0.0.1:0", True),
        ("ipc:///tmp/kv", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://collector:5557", False),
    ],
)
def test_an_endpoint_is_bound_where_vllm_binds_it(endpoint, bound):
    assert is_bound(endpoint) is bound


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"endpoint": "http://*:5557"}, "'http://\\*:5557' is no address"),
        ({"endpoint": "tcp://:5557"}, "is no address"),
        ({"endpoint": "tcp://*:five"}, "is no address"),
        ({"endpoint": "tcp://*"}, "no port"),
        ({"endpoint": "tcp://*:65535"}, "up to 65536 for 2 data parallel ranks"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "nowhere"}, "'nowhere' is no address"),
        ({"endpoint": "tcp://collector:99999"}, "65535 is the last"),
    ],
)
def test_a_wrong_address_is_an_error_before_any_socket_is_opened(config, problem):
    with pytest.raises(ConfigError, match=f"--kv-events-config.*{problem}"):
        check_config(kv_events_config(json.dumps({"publisher": "zmq", **config})), 2)
    # Without a publisher nothing of it is used.
    check_config(kv_events_config(json.dumps(config)), 2)
