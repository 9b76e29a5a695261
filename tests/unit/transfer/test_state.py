"""The table of KVPoll."""

import itertools

import pytest

from splitserve.ranks.kv_group import poll_and_all_reduce
from splitserve.transfer.state import TRANSITIONS, IllegalTransition, KVEvent, KVPoll, advance


class Fixed:
    def __init__(self, state):
        self.state = state

    def poll(self):
        return self.state


class TwoRanks:
    """The other rank's states, to be combined with ours."""

    def __init__(self, others):
        self.others = others

    def all_reduce_min(self, values):
        return [min(pair) for pair in zip(values, self.others, strict=True)]


def test_a_state_only_rises_or_fails():
    for state, moves in TRANSITIONS.items():
        for target in moves.values():
            assert target >= state or target is KVPoll.FAILED


def test_failed_is_sticky_and_success_cannot_fail_any_more():
    assert all(advance(KVPoll.FAILED, event) is KVPoll.FAILED for event in KVEvent)
    assert advance(KVPoll.SUCCESS, KVEvent.FAILED) is KVPoll.SUCCESS


def test_every_state_can_fail_and_every_other_move_is_in_the_table_or_raises():
    for state, event in itertools.product(KVPoll, KVEvent):
        if event in TRANSITIONS[state]:
            assert advance(state, event) is TRANSITIONS[state][event]
        else:
            assert event is not KVEvent.FAILED
            with pytest.raises(IllegalTransition, match=state.name):
                advance(state, event)


def test_ranks_agree_on_the_minimum():
    ours = [Fixed(KVPoll.SUCCESS), Fixed(KVPoll.TRANSFERRING), Fixed(KVPoll.SUCCESS)]
    theirs = TwoRanks([4, 4, 0])
    assert poll_and_all_reduce(ours, theirs) == [KVPoll.SUCCESS, KVPoll.TRANSFERRING, KVPoll.FAILED]
    assert poll_and_all_reduce(ours) == [KVPoll.SUCCESS, KVPoll.TRANSFERRING, KVPoll.SUCCESS]
