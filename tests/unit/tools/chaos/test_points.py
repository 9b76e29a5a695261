"""Where a write is interrupted: in its middle, whatever it is made of."""

import pytest

from splitserve.tools.chaos.points import FaultStage, _halved
from splitserve.transfer.copies import copy_table


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
