"""A lost peer is left alone for a while, longer each time, and never for good."""

from hypothesis import given
from hypothesis import strategies as st

from splitserve.transfer.peers import Backoff

times = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30)


def test_the_first_loss_is_free_then_the_pause_grows_up_to_the_longest():
    backoff = Backoff(first_pause=1.0, longest_pause=5.0, half_life=1e9)
    pauses = []
    for _ in range(5):
        backoff.lost("p", 0.0)
        pauses.append(round(backoff.retry_at("p", 0.0), 3))
    assert pauses == [0.0, 1.0, 3.0, 5.0, 5.0]


def test_a_peer_never_lost_may_be_tried_at_once():
    assert Backoff().retry_at("p", 7.0) == 7.0


def test_one_peers_losses_do_not_count_for_another():
    backoff = Backoff()
    for _ in range(3):
        backoff.lost("p", 0.0)
    assert backoff.retry_at("p", 0.0) > backoff.retry_at("q", 0.0) == 0.0


def test_losses_are_forgotten_with_time_and_leave_nothing_behind():
    backoff = Backoff(first_pause=1.0, half_life=10.0)
    for _ in range(4):
        backoff.lost("p", 0.0)
    before = backoff.level("p", 0.0)
    assert backoff.level("p", 10.0) == before / 2
    assert backoff.level("p", 100.0) == 0.0
    assert len(backoff) == 0
    backoff.lost("p", 100.0)
    assert backoff.retry_at("p", 100.0) == 100.0


@given(times)
def test_the_pause_is_never_longer_than_the_longest_and_never_in_the_past(gaps):
    backoff = Backoff(first_pause=0.5, longest_pause=8.0, half_life=20.0)
    now = 0.0
    for gap in gaps:
        now += gap
        backoff.lost("p", now)
        assert now <= backoff.retry_at("p", now) <= now + 8.0
        assert backoff.retry_at("p", now + 9.0) == now + 9.0
