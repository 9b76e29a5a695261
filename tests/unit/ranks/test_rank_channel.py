"""Real pipes between a driver and its followers, all in this process."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import pytest
import zmq

from splitserve.core.errors import EngineError, WorkerUnavailableError
from splitserve.core.messages import SchedulerFailed, decode_from_scheduler
from splitserve.core.parallel import ParallelRank
from splitserve.ranks import rank_channel
from splitserve.ranks.group_orders import CloseTransfer, OpenTransfer, group_order_in
from splitserve.ranks.rank_channel import DriverChannel, FollowerChannel, LinkThread, RankEndpoints
from splitserve.ranks.rank_process import end_rank

DEADLINE = 60.0
RANKS = tuple(ParallelRank(tp_size=2, pp_size=2).group())
DRIVER = next(rank for rank in RANKS if rank.is_driver)
FOLLOWERS = [rank for rank in RANKS if not rank.is_driver]


@pytest.fixture
def endpoints(tmp_path: Path) -> RankEndpoints:
    return RankEndpoints.in_folder(str(tmp_path), "0", len(RANKS))


@pytest.fixture
def channels(endpoints: RankEndpoints) -> Iterator[tuple[DriverChannel, list[FollowerChannel]]]:
    with ExitStack() as stack:
        # The driver starts first: its messages wait for the others.
        driver = DriverChannel(endpoints, DRIVER)
        driver.send_order(b"first")
        followers = []
        for rank in FOLLOWERS:
            followers.append(FollowerChannel(endpoints, rank))
            stack.callback(followers[-1].close)
        # It closes first: for a follower that is gone it would wait.
        stack.callback(driver.close)
        yield driver, followers


@pytest.fixture
def linked(channels) -> tuple[DriverChannel, list[FollowerChannel]]:
    """Return channels with open links."""
    driver, followers = channels
    driver.open_transfer("http://bootstrap")
    for follower in followers:
        open_as_ordered(follower)
    return driver, followers


def open_as_ordered(follower: FollowerChannel) -> OpenTransfer:
    order = next(order for data in follower.orders() if (order := group_order_in(data)) is not None)
    assert isinstance(order, OpenTransfer)
    follower.open_link(order.number)
    return order


def test_every_follower_gets_every_order_in_its_order_up_to_the_last(channels) -> None:
    driver, followers = channels
    for i in range(50):
        driver.send_order(b"%d" % i)
    driver.close()
    for follower in followers:
        assert list(follower.orders()) == [b"first", *(b"%d" % i for i in range(50))]


def test_every_rank_learns_what_each_says_of_itself(linked) -> None:
    driver, followers = linked
    with ThreadPoolExecutor(len(RANKS)) as pool:
        answers = [
            pool.submit(follower.exchange, b"%d" % rank.index, DEADLINE)
            for rank, follower in zip(FOLLOWERS, followers, strict=True)
        ]
        assert driver.exchange(b"2", DEADLINE) == [b"0", b"1", b"2", b"3"]
        assert all(answer.result() == [b"0", b"1", b"2", b"3"] for answer in answers)


def test_two_threads_send_orders_and_every_follower_gets_them_in_one_order(channels) -> None:
    driver, followers = channels
    sent = [[b"%d %d" % (thread, i) for i in range(200)] for thread in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda orders: [driver.send_order(order) for order in orders], sent))
    first, *others = [list(islice(follower.orders(), 401)) for follower in followers]
    assert all(received == first for received in others)
    for orders in sent:
        assert [order for order in first if order in orders] == orders


def test_a_rank_that_says_nothing_is_an_error(linked) -> None:
    driver, _ = linked
    with pytest.raises(WorkerUnavailableError, match="said nothing for 0 s"):
        driver.exchange(b"2", 0.0)


def test_frames_about_rooms_go_both_ways_and_keep_their_order(linked) -> None:
    driver, followers = linked
    heard: queue.Queue[tuple[int, bytes]] = queue.Queue()

    def collect() -> None:
        for i, link in enumerate(driver.links):
            for frame in link.collect():
                heard.put((i, frame))

    def send_back(follower: FollowerChannel) -> None:
        for frame in follower.link.collect():
            follower.link.send(frame)

    with ExitStack() as stack:
        threads = [LinkThread(driver.links, collect, pytest.fail)]
        threads += [LinkThread([f.link], lambda f=f: send_back(f), pytest.fail) for f in followers]
        for thread in threads:
            thread.start()
            stack.callback(thread.close)
        for link in driver.links:
            for i in range(20):
                link.send(b"%d" % i)
        answers = [heard.get(timeout=DEADLINE) for _ in range(20 * len(followers))]
    for i in range(len(followers)):
        assert [frame for sender, frame in answers if sender == i] == [b"%d" % n for n in range(20)]


def test_frames_of_an_earlier_kv_transfer_do_not_arrive_in_a_later_one(linked) -> None:
    driver, followers = linked
    for link, follower in zip(driver.links, followers, strict=True):
        link.send(b"late")
        follower.link.send(b"late")
    driver.close_transfer()
    instance = driver.open_transfer(None)
    for follower in followers:
        assert group_order_in(next(follower.orders())) == CloseTransfer()
        follower.close_link()
        assert open_as_ordered(follower) == OpenTransfer(1, instance, None)
    with ThreadPoolExecutor(len(FOLLOWERS)) as pool:
        answers = [pool.submit(follower.exchange, b"new", DEADLINE) for follower in followers]
        assert driver.exchange(b"new", DEADLINE) == [b"new"] * len(RANKS)
        assert all(answer.result() == [b"new"] * len(RANKS) for answer in answers)


def test_a_thread_ticks_when_it_is_woken(linked) -> None:
    driver, _ = linked
    ticks: queue.Queue[None] = queue.Queue()
    thread = LinkThread(driver.links, lambda: ticks.put(None), pytest.fail)
    thread.start()
    thread.wake()
    ticks.get(timeout=DEADLINE)
    thread.close()
    thread.close()


def test_a_tick_that_fails_is_the_last_and_is_told(linked) -> None:
    driver, _ = linked
    lost: queue.Queue[str] = queue.Queue()

    def tick() -> None:
        raise KeyError("a room that was never opened")

    with closing(LinkThread(driver.links, tick, lost.put)) as thread:
        thread.start()
        thread.wake()
        assert "KeyError('a room that was never opened')" in lost.get(timeout=DEADLINE)
        thread.wake()
    assert lost.empty()


def test_a_link_that_ends_on_our_side_is_found_though_nobody_wakes_the_thread(linked) -> None:
    driver, _ = linked
    lost: queue.Queue[str] = queue.Queue()
    with closing(LinkThread(driver.links, lambda: None, lost.put)) as thread:
        thread.start()
        driver.links[1].is_open = False
        assert "takes no word of rooms any more" in lost.get(timeout=DEADLINE)


def test_a_rank_that_ends_tells_the_front_end_why(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/from"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PULL) as front_end:
        front_end.bind(endpoint)
        # A program of its own would import torch.
        if (rank := os.fork()) == 0:
            try:
                end_rank(ParallelRank(tp_size=2, tp_rank=1), endpoint, "out of step")
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 1
        assert front_end.poll(int(DEADLINE * 1000))
        said = decode_from_scheduler(front_end.recv())
    assert said == SchedulerFailed(message="rank tp 1 of 2, pp 0 of 1: out of step")


def test_a_follower_that_takes_nothing_any_more_is_an_error_and_no_wait(
    endpoints: RankEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_channel, "_LINGER_MS", 0)
    driver = DriverChannel(endpoints, DRIVER)
    try:
        driver.open_transfer(None)
        for _ in range(rank_channel.MAX_ORDERS - 1):
            driver.send_order(b"order")
        with pytest.raises(EngineError, match="rank 0 of this worker does not take its orders"):
            driver.send_order(b"order")
        link = driver.links[0]
        for _ in range(rank_channel.MAX_ROOM_FRAMES):
            link.send(b"frame")
        assert link.is_open
        link.send(b"frame")
        assert not link.is_open
    finally:
        driver.close()


def test_ranks_of_two_schedulers_have_pipes_of_their_own(tmp_path: Path) -> None:
    one, other = (RankEndpoints.in_folder(str(tmp_path), name, 2) for name in "01")
    used = [{e.init_method, *e.orders, *e.to_rank, *e.from_rank} for e in (one, other)]
    assert not used[0] & used[1]
    assert [len(names) for names in used] == [7, 7]
