"""Connections that have not authenticated: few, short-lived, the oldest dropped first, one line in the log a minute."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.clock import ManualClock
from splitserve.transfer.pending import HANDSHAKE_SECONDS, LOG_INTERVAL, PendingHandshakes


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def table(clock):
    return PendingHandshakes("data port", clock, max_pending=4, max_per_address=2)


def test_the_oldest_of_a_full_address_is_dropped_and_no_other_address_is_harmed(table):
    table.add("peer", "10.0.0.2")
    assert [table.add(n, "10.0.0.1") for n in range(4)] == [None, None, 0, 1]
    assert "peer" in table
    assert len(table) == 3


def test_the_oldest_of_all_is_dropped_where_the_table_is_full(table):
    dropped = [table.add(n, f"10.0.0.{n}") for n in range(6)]
    assert dropped == [None, None, None, None, 0, 1]


def test_a_connection_has_one_second_to_authenticate(table, clock):
    table.add("silent", "a")
    table.add("quick", "a")
    table.remove("quick")
    assert table.seconds_left() == HANDSHAKE_SECONDS == 1.0
    clock.advance(0.99)
    assert table.expire() == []
    clock.advance(0.02)
    assert table.expire() == ["silent"]
    assert (len(table), table.seconds_left()) == (0, None)


def test_a_flood_is_one_line_in_the_log_a_minute(table, clock, caplog):
    with caplog.at_level(logging.WARNING):
        for n in range(1000):
            table.add(n, "10.0.0.1")
        assert len(caplog.records) == 1
        clock.advance(LOG_INTERVAL)
        table.add("another", "10.0.0.1")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "count=998 last_address=10.0.0.1" in caplog.records[1].getMessage()


def test_a_flood_that_has_ended_is_counted_when_its_minute_is_over(table, clock, caplog):
    with caplog.at_level(logging.WARNING):
        for n in range(10):
            table.add(n, "10.0.0.1")
        clock.advance(HANDSHAKE_SECONDS)
        assert len(table.expire()) == 2
        assert table.seconds_left() == LOG_INTERVAL - HANDSHAKE_SECONDS
        clock.advance(LOG_INTERVAL)
        assert table.expire() == []
        assert table.seconds_left() is None
    assert [record.args[1] for record in caplog.records] == [1, 9]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "tick"]), st.integers(0, 9), st.sampled_from("abcd"))))
def test_the_table_is_never_above_its_limits_and_forgets_nothing_silently(actions):
    clock = ManualClock()
    table = PendingHandshakes("data port", clock, max_pending=5, max_per_address=3)
    held, number = {}, 0
    for action, n, address in actions:
        if action == "add":
            dropped = table.add(number, address)
            held[number] = address, clock.now()
            if dropped is not None:
                # Nothing older is kept: of this address, or of all.
                rivals = [i for i, (a, _) in held.items() if a == held[dropped][0]]
                assert dropped in (min(rivals), min(held))
                del held[dropped]
            number += 1
        elif action == "remove":
            table.remove(n)
            held.pop(n, None)
        else:
            clock.advance(0.3)
            late = {i for i, (_, since) in held.items() if clock.now() - since >= HANDSHAKE_SECONDS}
            assert set(table.expire()) == late
            held = {i: place for i, place in held.items() if i not in late}
        assert len(table) == len(held) <= 5
        assert all(i in table for i in held)
        addresses = [a for a, _ in held.values()]
        assert all(addresses.count(a) <= 3 for a in addresses)
