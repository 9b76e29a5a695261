"""From copy lists to NIXL's requests, with an agent that records its calls."""

import pytest

from splitserve._native import tables
from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import nixl_requests
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.nixl_requests import MAX_GRIDS, Lane, requests_of

# Regions of 100 and 60 bytes here, of 40 and 200 there.
OURS = [Region(1000, 100), Region(5000, 60)]
THEIRS = [Region(20000, 40), Region(30000, 200)]


class Prepared:
    def __init__(self, rows):
        self.rows, self.is_released = rows, False

    def release(self):
        self.is_released = True

    def block(self, number):
        """(address, length) of one block, as the library counts them."""
        assert not self.is_released
        for address, size, _, stride, count in self.rows:
            if number < count:
                return address + number * stride, size
            number -= count
        raise AssertionError("no such block")


class Agent:
    """Requests are: how they were made, lists of ((address, length) here, (address, length) there), and notes."""

    def __init__(self):
        self.prepared = []

    def add_remote_agent(self, metadata):
        return "peer"

    def remove_remote_agent(self, peer):
        assert peer == "peer"

    def prep_xfer_dlist(self, agent_name, rows, kind):
        self.prepared.append(Prepared(rows.tolist()))
        return self.prepared[-1]

    def make_prepped_xfer(self, operation, ours, our_blocks, theirs, their_blocks, note):
        ends = zip(our_blocks.tolist(), their_blocks.tolist(), strict=True)
        return "blocks", [(ours.block(a), theirs.block(b)) for a, b in ends], note

    def get_xfer_descs(self, rows, kind):
        return [(address, length) for address, length, _ in rows.tolist()]

    def initialize_xfer(self, operation, ours, theirs, peer, note):
        return "pieces", list(zip(ours, theirs, strict=True)), note


def expected(rows):
    return [((OURS[s].address + a, n), (THEIRS[d].address + b, n)) for s, a, d, b, n in rows]


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
def lane(agent):
    return Lane(agent, b"", Memory(OURS), Memory(THEIRS))


@pytest.mark.skipif(not tables.is_built, reason="pages are sorted in C alone")
def test_a_large_write_is_joined_and_goes_in_the_order_of_its__of_a_requests_size(monkeypatch, agent):
    monkeypatch.setattr(nixl_requests, "MAX_BATCH_PIECES", 2)
    here = Memory([Region(1 << 20, 6 * 4096)])
    # Of pages 4 and 5 the targets are neighbours too.
    places = [(4, 0), (5, 1), (0, 6), (3, 4), (1, 2)]
    copies = copy_table((0, 4096 * s, 0, 4096 * d, 4096) for s, d in places)
    num_bytes = 5 * 4096

    def pages(parts):
        return [[(s // 4096, d // 4096, n // 4096) for _, s, _, d, n in part.tolist()] for part in parts]

    assert pages(requests_of(copies, num_bytes, here, 1)) == [[(4, 0, 2), (0, 6, 1)], [(3, 4, 1), (1, 2, 1)]]
    monkeypatch.setattr(tables, "ORDERED_BYTES", num_bytes)
    assert pages(requests_of(copies, num_bytes, here, 1)) == [[(0, 6, 1), (1, 2, 1)], [(3, 4, 1), (4, 0, 2)]]


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_a_write_that_one_request_could_hold_has_a_part_for_each_lane(num_lanes):
    parts = requests_of(copy_table([(0, 0, 1, 0, 100)]), 100, Memory(OURS), num_lanes)
    assert len(parts) == num_lanes
    lengths = [part["length"].item() for part in parts]
    assert sum(lengths) == 100
    assert max(lengths) == -(-100 // num_lanes)


BLOCKS = [(0, 90, 1, 190, 10), (1, 0, 0, 30, 10), (1, 50, 1, 0, 10)]


def test_pieces_at_multiples_of_their_size_are_picked_from_lists_made_once(agent, lane):
    for _ in range(3):
        assert lane.make(copy_table(BLOCKS), b"note") == ("blocks", expected(BLOCKS), b"note")
    assert len(agent.prepared) == 2


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 0, 0, 10)],
        [(0, 0, 0, 0, 10), (0, 20, 0, 20, 20)],
        [(0, 0, 0, 0, 10), (0, 25, 0, 20, 10)],
        [(0, 0, 0, 0, 10), (0, 20, 0, 25, 10)],
    ],
    ids=["one", "unequal", "between blocks here", "between blocks there"],
)
def test_other_pieces_are_described_one_by_one(agent, lane, rows, is_known):
    if is_known:
        lane.make(copy_table(BLOCKS), b"")
    assert lane.make(copy_table(rows), b"note") == ("pieces", expected(rows), b"note")
    assert len(agent.prepared) == 2 * is_known


def test_the_oldest_lists_go_where_there_are_many_sizes(agent, lane):
    def write(size):
        rows = [(0, 0, 1, size, size), (0, size, 1, 0, size)]
        assert lane.make(copy_table(rows), b"") == ("blocks", expected(rows), b"")

    for size in range(1, MAX_GRIDS + 2):
        write(size)
    assert [prepared.is_released for prepared in agent.prepared] == [True] * 2 + [False] * 2 * MAX_GRIDS
    write(1)
    lane.close()
    assert all(prepared.is_released for prepared in agent.prepared)


def test_memory_of_too_many_blocks_is_described_piece_by_piece(agent, lane, monkeypatch):
    monkeypatch.setattr(nixl_requests, "MAX_BLOCKS", 23)
    assert lane.make(copy_table(BLOCKS), b"")[0] == "pieces"
    monkeypatch.setattr(nixl_requests, "MAX_BLOCKS", 24)
    assert lane.make(copy_table(BLOCKS), b"")[0] == "blocks"


def test_regions_that_came_after_the_lists_are_in_none(agent):
    ours = Memory(OURS)
    lane = Lane(agent, b"", ours, Memory(THEIRS))
    lane.make(copy_table(BLOCKS), b"")
    ours.add([Region(9000, 100)])
    way, pairs, _ = lane.make(copy_table([(2, 0, 0, 0, 10), (2, 10, 0, 10, 10)]), b"")
    assert (way, pairs[0]) == ("pieces", ((9000, 10), (20000, 10)))


def test_of_nothing_at_all_there_is_no_part():
    """Many pieces of nothing, more than one request may hold."""
    rows = [(0, 2 * i % 50, 0, i % 30, 0) for i in range(nixl_requests.MAX_BATCH_PIECES + 1)]
    assert requests_of(copy_table(rows), 0, Memory(OURS), 1) == []
