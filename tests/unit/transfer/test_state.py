"""The tables of both sides of a room."""

import itertools

import pytest

from splitserve.transfer.room import poll_and_all_reduce
from splitserve.transfer.state import POLL, RECEIVER, SENDER, IllegalTransition, KVEvent, KVPoll, RoomState, advance

TABLES = pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])


@TABLES
def test_what_the_scheduler_polls_only_rises_or_fails(table):
    for state, moves in table.items():
        for target in moves.values():
            if RoomState.CLOSED not in (state, target):
                assert POLL[target] >= POLL[state] or POLL[target] is KVPoll.FAILED


@TABLES
def test_failed_is_sticky_and_success_cannot_fail_any_more(table):
    for state in (RoomState.SUCCESS, RoomState.FAILED, RoomState.STOPPING, RoomState.CLOSED):
        assert advance(table, state, KVEvent.FAILED) is state


@TABLES
def test_every_state_can_fail_and_every_other_move_is_in_the_table_or_raises(table):
    for state, event in itertools.product(table, KVEvent):
        if event in table[state]:
            assert advance(table, state, event) is table[state][event]
        else:
            assert event is not KVEvent.FAILED
            with pytest.raises(IllegalTransition, match=state.name):
                advance(table, state, event)


@TABLES
def test_pages_that_a_peer_may_access_are_never_closed(table):
    assert all(KVEvent.CLEARED not in table[state] for state in (RoomState.TRANSFERRING, RoomState.STOPPING))


def test_the_scheduler_can_poll_every_state_but_a_closed_one():
    assert set(POLL) == set(SENDER) - {RoomState.CLOSED}


def test_ranks_agree_on_the_minimum():
    assert poll_and_all_reduce(KVPoll.SUCCESS, [KVPoll.TRANSFERRING, KVPoll.SUCCESS]) is KVPoll.TRANSFERRING
    assert poll_and_all_reduce(KVPoll.TRANSFERRING, [KVPoll.FAILED]) is KVPoll.FAILED
    assert poll_and_all_reduce(KVPoll.SUCCESS, []) is KVPoll.SUCCESS
