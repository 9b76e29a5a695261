from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from splitserve.ranks.rank_heartbeat import MAX_MISSED_HEARTBEATS, FollowerHeartbeats, send_heartbeats


@pytest.fixture
def heartbeats() -> Iterator[FollowerHeartbeats]:
    with closing(FollowerHeartbeats()) as heartbeats:
        yield heartbeats


def test_a_follower_that_loads_is_not_missing(heartbeats: FollowerHeartbeats) -> None:
    assert not any(heartbeats.is_missing() for _ in range(2 * MAX_MISSED_HEARTBEATS))
    heartbeats.close_writer()


def test_only_checks_in_a_row_count(heartbeats: FollowerHeartbeats) -> None:
    for _ in range(3):
        os.write(heartbeats.writer, b"..")
        assert not any(heartbeats.is_missing() for _ in range(MAX_MISSED_HEARTBEATS))
    assert heartbeats.is_missing()
    heartbeats.close_writer()
    # The follower has ended: its exit code says more.
    assert not heartbeats.is_missing()


def test_heartbeats_are_sent_until_the_owner_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.ranks.rank_heartbeat.HEARTBEAT_SECONDS", 0.001)
    reader, writer = os.pipe()
    thread = send_heartbeats(writer)
    for _ in range(3):
        assert os.read(reader, 1) == b"."
    os.close(reader)
    thread.join(60.0)
    assert not thread.is_alive()
    os.close(writer)
