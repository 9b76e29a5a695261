"""A prefill worker of two data parallel ranks: every room is on the rank of its number, or of its request."""

import pytest

from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.transfer.peers import LookupFailure
from splitserve.transfer.state import KVPoll
from support.kv_world import BOOTSTRAP, KVWorker, KVWorld


class TwoRanks(KVWorld):
    def __init__(self) -> None:
        super().__init__(prefill={"rank": ParallelRank(dp_rank=0, dp_size=2)})
        rank = ParallelRank(dp_rank=1, dp_size=2)
        self.second = KVWorker(self, DisaggregationMode.PREFILL, "prefill-1", epoch=12, rank=rank)
        self.book.entries[BOOTSTRAP._replace(dp_rank=1)] = [self.second.manager.prefill_info()]

    def open(self, room: int, dp_rank: int | None = None):
        """The receiver of a room, and the senders that either rank would have for it."""
        info = BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room), dp_rank)
        senders = [w.manager.sender(f"p{room}", info) for w in (self.prefill, self.second)]
        return self.decode.manager.receiver(f"d{room}", info), senders

    def tick(self, times: int = 8) -> None:
        for _ in range(times):
            super().tick(1)
            self.second.manager.tick()


@pytest.fixture
def world() -> TwoRanks:
    return TwoRanks()


@pytest.mark.parametrize(("room", "dp_rank", "expected"), [(4, None, 0), (5, None, 1), (4, 1, 1), (5, 0, 0)])
def test_a_room_is_announced_to_its_rank_and_to_no_other(world, room, dp_rank, expected):
    receiver, senders = world.open(room, dp_rank)
    world.tick()
    receiver.init([5], 0, num_tokens=4)
    world.tick()
    assert [s.poll() is KVPoll.WAITING_FOR_INPUT for s in senders] == [expected == 0, expected == 1]


def test_each_rank_is_found_once(world):
    receivers = [world.open(room)[0] for room in range(6)]
    world.tick()
    assert {r.poll() for r in receivers} == {KVPoll.WAITING_FOR_INPUT}
    receivers.append(world.open(7)[0])
    assert receivers[-1].poll() is KVPoll.WAITING_FOR_INPUT
    assert world.book.requests == [BOOTSTRAP, BOOTSTRAP._replace(dp_rank=1)]


def test_an_abort_before_anything_is_known_reaches_the_rank_of_the_room(world):
    receiver, senders = world.open(5)
    receiver.abort("the client left")
    world.tick()
    assert [s.poll() for s in senders] == [KVPoll.BOOTSTRAPPING, KVPoll.FAILED]


def test_a_rank_that_is_lost_takes_no_room_of_the_other_with_it(world):
    (even, _), (odd, _) = world.open(4), world.open(5)
    world.tick()
    for page, receiver in enumerate((even, odd)):
        receiver.init([page], page, num_tokens=4)
    world.tick()
    for _ in range(20):
        world.clock.advance(1.0)
        KVWorld.tick(world, 2)
    assert (even.poll(), odd.poll()) == (KVPoll.TRANSFERRING, KVPoll.FAILED)
    assert "data parallel rank 1 was lost" in odd.failure().message


def test_a_rank_that_is_not_there_fails_its_request_at_once(world):
    missing = BOOTSTRAP._replace(dp_rank=2)
    world.book.entries[missing] = LookupFailure("no such rank", is_definitive=True)
    receiver, _ = world.open(4, dp_rank=2)
    world.tick()
    assert isinstance(receiver.failure(), WorkerUnavailableError)
