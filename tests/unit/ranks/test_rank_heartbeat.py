from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from splitserve.ranks.rank_heartbeat import MAX_MISSED_HEARTBEATS, RankHeartbeats, send_heartbeats


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "heartbeat")


@pytest.fixture
def heartbeats(path: str) -> Iterator[RankHeartbeats]:
    with closing(RankHeartbeats(path)) as heartbeats:
        yield heartbeats


def test_a_rank_that_loads_is_not_missing(heartbeats: RankHeartbeats, path: str) -> None:
    assert not any(heartbeats.is_missing() for _ in range(2 * MAX_MISSED_HEARTBEATS))
    with open(path, "wb"):
        assert not any(heartbeats.is_missing() for _ in range(2 * MAX_MISSED_HEARTBEATS))
        assert heartbeats.num_missed == 0


def test_only_checks_in_a_row_count(heartbeats: RankHeartbeats, path: str) -> None:
    with open(path, "wb", buffering=0) as writer:
        for _ in range(3):
            writer.write(b"..")
            assert not any(heartbeats.is_missing() for _ in range(MAX_MISSED_HEARTBEATS))
        assert heartbeats.is_missing()
        assert heartbeats.num_missed == MAX_MISSED_HEARTBEATS
        writer.write(b".")
        assert not heartbeats.is_missing()
    # The rank has ended: its exit code says more.
    assert not any(heartbeats.is_missing() for _ in range(2 * MAX_MISSED_HEARTBEATS))


def test_heartbeats_are_sent_until_the_owner_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.ranks.rank_heartbeat.HEARTBEAT_SECONDS", 0.001)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    thread = send_heartbeats(path)
    for _ in range(2):
        assert select.select([reader], [], [], 60)[0]
        assert set(os.read(reader, 1)) == set(b".")
    os.close(reader)
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_rank_without_an_owner_sends_nothing(path: str) -> None:
    os.mkfifo(path)
    for missing in (path, f"{path}-removed"):
        thread = send_heartbeats(missing)
        thread.join(60.0)
        assert not thread.is_alive()
