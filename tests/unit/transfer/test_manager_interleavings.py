"""Random orders of everything that can happen between two managers; what must hold in all of them.

Messages are lost, doubled and overtaken, connections break, requests are aborted, either worker is killed and
replaced, fences take their time. Decode keeps a canary in every free page: a byte that lands in a page after its
release kills it. Prefill spoils its pages as soon as it may: a byte read after that arrives wrong. `make soak` makes
10,000 runs.
"""

import itertools
import random

import pytest

from splitserve.core.request import BootstrapInfo, RoomKey
from splitserve.transfer.state import KVPoll
from support.kv_world import BOOTSTRAP, NUM_PAGES, NUM_ROWS, PAGE_SIZE, KVWorld

CANARY = 0xAB
NUM_ROOMS = 10
# What can happen, and how often.
EVENTS = {
    "open": 8,
    "announce": 10,
    "send": 10,
    "tick": 25,
    "frame": 25,
    "bytes": 40,
    "time": 4,
    "abort": 1,
    "drop": 0.3,
    "double": 1,
    "overtake": 1,
    "break": 0.3,
    "new prefill": 0.15,
    "new decode": 0.1,
}
DISTURBANCES = {"abort", "drop", "double", "overtake", "break", "new prefill", "new decode", "death"}


class DecodeQueue:
    """Decode's pool and its rooms: pages are taken, announced, and released only when their room is quiescent."""

    def __init__(self, world, ended=None):
        self.world = world
        self.free = list(range(NUM_PAGES))
        self.free_rows = list(range(NUM_ROWS))
        # Receivers of ended rooms that are not quiescent yet.
        self.leases = []
        self.rooms = {}
        self.ended = {} if ended is None else ended
        for component in world.decode.pages:
            component[:] = CANARY

    def announce(self, room, num_pages):
        receiver = self.rooms[room]
        if receiver.poll() is not KVPoll.WAITING_FOR_INPUT or len(self.free) < num_pages or not self.free_rows:
            return
        pages, row = self.free[:num_pages], self.free_rows.pop()
        del self.free[:num_pages]
        receiver.init(pages, row, num_tokens=PAGE_SIZE * num_pages)
        receiver.pages, receiver.row = pages, row

    def reap(self):
        for room, receiver in list(self.rooms.items()):
            if receiver.poll() in (KVPoll.SUCCESS, KVPoll.FAILED):
                if receiver.poll() is KVPoll.SUCCESS:
                    assert self.world.decode.holds(receiver.pages, seed=room), f"room {room} succeeded with wrong bytes"
                    assert self.world.decode.metadata.get_buf(receiver.row, receiver.key).output_id == room
                self.ended[room] = receiver.poll()
                self.leases.append(receiver)
                del self.rooms[room]
        for receiver in [receiver for receiver in self.leases if receiver.quiescent()]:
            self.leases.remove(receiver)
            receiver.clear()
            self.release(getattr(receiver, "pages", []), getattr(receiver, "row", None))

    def release(self, pages, row):
        for component in self.world.decode.pages:
            component[pages] = CANARY
        self.free += pages
        self.free_rows += [] if row is None else [row]

    def check_canaries(self):
        for component in self.world.decode.pages:
            assert (component[self.free] == CANARY).all(), "a byte landed in a page that was free"


class Chaos:
    events = EVENTS
    num_steps = 500
    # Pages that a page of decode's is on prefill.
    source_pages = 1

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.world = self.make_world()
        self.queue = DecodeQueue(self.world)
        self.senders = {}
        self.closed_senders = {}
        self.causes = {}
        self.left = {}
        self.sizes = {room: self.rng.randint(1, 6) for room in range(1, NUM_ROOMS + 1)}
        self.unsent = {"prefill": list(self.sizes), "decode": list(self.sizes)}
        self.graveyard = []
        self.ended_with_decode = set()
        self.epochs = itertools.count(10_000, 100)

    def make_world(self):
        return KVWorld(step=True, late_fences=self.rng.random() < 0.5)

    def pages_on_prefill(self, room):
        """Disjoint for each room."""
        first = (room - 1) * 6 * self.source_pages
        return list(range(first, first + self.sizes[room] * self.source_pages))

    def open_one(self):
        side = self.rng.choice(["prefill", "decode"])
        if not self.unsent[side]:
            return
        room = self.unsent[side].pop(0)
        info = BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room))
        if side == "decode":
            self.queue.rooms[room] = self.world.decode.manager.receiver(f"d{room}", info)
        else:
            # Filled with bytes that only this room has.
            self.left[room] = self.pages_on_prefill(room)
            self.world.prefill.fill(self.left[room], seed=room)
            self.senders[room] = self.world.prefill.manager.sender(f"p{room}", info)

    def send_one(self):
        ready = [r for r, s in self.senders.items() if s.poll() in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING)]
        ready = [r for r in ready if self.left[r] is not None]
        if not ready:
            return
        room = self.rng.choice(ready)
        n = self.rng.randint(0, len(self.left[room]))
        is_last = n == len(self.left[room])
        chunk, rest = self.left[room][:n], self.left[room][n:]
        if is_last:
            self.world.set_row(room, index=room, token=room)
        self.senders[room].send(chunk, is_last=is_last, metadata_index=room if is_last else None)
        self.left[room] = None if is_last else rest

    def abort_one(self):
        ports = [*self.senders.values(), *self.queue.rooms.values()]
        if ports:
            self.rng.choice(ports).abort("chaos")

    def clear_senders(self):
        for room, sender in list(self.senders.items()):
            if sender.quiescent():
                self.closed_senders[room] = sender.poll()
                if sender.poll() is KVPoll.FAILED:
                    self.causes[room] = sender.failure().message
                sender.clear()
                del self.senders[room]
                self.spoil(room)

    def spoil(self, room):
        """Return whether no reader of the room's pages and row is left on prefill."""
        for component in self.world.prefill.pages:
            component[self.pages_on_prefill(room)] = 0xEE
        self.world.set_row(0, index=room, token=0)

    def replace_decode(self):
        """Its rooms die with it; those that had not come yet go to its successor."""
        for room in self.queue.rooms:
            self.ended_with_decode.add(room)
        self.world.replace_decode(epoch=next(self.epochs))
        self.queue = DecodeQueue(self.world, self.queue.ended)

    def replace_prefill(self):
        for room in self.senders:
            self.closed_senders[room] = KVPoll.FAILED
        self.senders.clear()
        self.graveyard.append(self.world.replace_prefill(epoch=next(self.epochs)))

    def step(self):
        world, rng = self.world, self.rng
        match rng.choices(
            [*self.events],
            weights=[*self.events.values()],
        )[0]:
            case "open":
                self.open_one()
            case "announce" if self.queue.rooms:
                room = rng.choice(list(self.queue.rooms))
                self.queue.announce(room, self.sizes[room])
            case "send":
                self.send_one()
            case "tick":
                rng.choice(world.turns())()
            case ("frame" | "drop") as what if busy := world.wires.busy():
                world.wires.deliver(rng.choice(busy), drop=what == "drop")
            case "double" if busy := world.wires.busy():
                world.wires.duplicate(rng.choice(busy), rng.randrange(4))
            case "overtake" if busy := world.wires.busy():
                world.wires.overtake(rng.choice(busy), rng.randrange(4))
            case "bytes" if busy := world.network.busy_sessions():
                world.network.run_one(rng.choice(busy))
            case "time":
                world.clock.advance(rng.choice([0.1, 1.0, 3.0]))
            case "abort":
                self.abort_one()
            case "break" if busy := world.network.busy_sessions():
                world.network.break_session(rng.choice(busy))
            case "new prefill":
                self.replace_prefill()
            case "new decode":
                self.replace_decode()
            case other:
                self.happen(other)
        self.clear_senders()
        self.queue.reap()
        self.queue.check_canaries()

    def may_fail_alone(self, cause):
        """Whether a room that succeeded on decode may have ended like this on prefill."""
        return False

    def happen(self, event):
        """Checks that only other worlds make."""

    def run(self):
        for _ in range(self.num_steps):
            self.step()
        self.run_out()

    def run_out(self):
        """No more disturbances: everything open must end by itself."""
        for _ in range(200):
            self.world.clock.advance(1.0)
            self.world.tick(2)
            for _ in range(20):
                if busy := self.world.network.busy_sessions():
                    self.world.network.run_one(self.rng.choice(busy))
            self.clear_senders()
            self.queue.reap()
            self.queue.check_canaries()


@pytest.mark.parametrize("block", range(10))
def test_in_any_order_every_room_ends_and_no_byte_lands_in_a_released_page(block):
    assert check_runs(range(block * 15, block * 15 + 15)) == {KVPoll.SUCCESS, KVPoll.FAILED}


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_runs(block):
    assert check_runs(range(block * 500, block * 500 + 500)) == {KVPoll.SUCCESS, KVPoll.FAILED}


def check_runs(seeds, make=Chaos):
    """The states that rooms ended in."""
    outcomes = set()
    for seed in seeds:
        chaos = make(seed)
        chaos.run()
        queue = chaos.queue
        assert not queue.rooms, f"seed {seed}: decode rooms did not end"
        assert not chaos.senders, f"seed {seed}: prefill rooms did not end"
        assert len(queue.leases) == 0, f"seed {seed}: leases were never released"
        assert sorted(queue.free) == list(range(NUM_PAGES)), f"seed {seed}: pages leaked"
        assert sorted(queue.free_rows) == list(range(NUM_ROWS)), f"seed {seed}: rows leaked"
        assert chaos.world.num_rooms() == 0
        for room, state in queue.ended.items():
            outcomes.add(state)
            lived_on = not chaos.graveyard and room not in chaos.ended_with_decode
            if state is KVPoll.SUCCESS and room in chaos.closed_senders and lived_on:
                cause = chaos.causes.get(room, "")
                is_same = chaos.closed_senders[room] is KVPoll.SUCCESS or chaos.may_fail_alone(cause)
                assert is_same, f"seed {seed}: room {room} succeeded on decode, but on prefill: {cause}"
    return outcomes


def test_without_disturbances_every_room_succeeds_in_any_order():
    check_quiet_runs(range(40))


def check_quiet_runs(seeds, make=Chaos):
    for seed in seeds:
        chaos = make(seed)
        chaos.events = {event: often for event, often in chaos.events.items() if event not in DISTURBANCES}
        chaos.world.clock.advance = lambda seconds, turn=chaos.world.clock.advance: turn(min(seconds, 0.01))
        for _ in range(20 * chaos.num_steps):
            chaos.step()
            if len(chaos.queue.ended) == NUM_ROOMS and not chaos.senders:
                break
        assert set(chaos.queue.ended.values()) == {KVPoll.SUCCESS}, f"seed {seed}: {chaos.queue.ended}"
        assert set(chaos.closed_senders.values()) == {KVPoll.SUCCESS}


def test_the_canary_would_notice_pages_that_are_released_too_early(monkeypatch):
    monkeypatch.setattr("splitserve.transfer.receiver.KVReceiver.quiescent", lambda self: self.is_final)
    monkeypatch.setattr("splitserve.transfer.receiver.KVReceiver.clear", lambda self: self._on_clear(self))

    def run():
        for seed in range(100):
            chaos = Chaos(seed)
            for _ in range(500):
                chaos.step()

    with pytest.raises(AssertionError, match="was free"):
        run()
