"""Only whole frames of the cluster, for this address, get in, and each of them once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.transfer.seal import MAX_SENDERS, WINDOW, ReplayWindow, SealError, control_key, seal, unseal

KEY = control_key(b"a token of the cluster")
ADDRESS = "tcp://127.0.0.1:5"


@given(st.binary(max_size=300), st.integers(0, 65535), st.text(max_size=40))
def test_an_envelope_survives_the_trip(envelope, version, address):
    assert unseal(KEY, address, seal(KEY, version, address, envelope)) == (version, envelope)


@given(st.binary(max_size=200), st.data())
def test_a_change_of_any_byte_breaks_the_seal(envelope, data):
    frame = bytearray(seal(KEY, 2, ADDRESS, envelope))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SealError):
        unseal(KEY, ADDRESS, bytes(frame))


@given(st.binary(max_size=200), st.data())
def test_a_frame_cut_short_or_made_longer_breaks_the_seal(envelope, data):
    frame = seal(KEY, 2, ADDRESS, envelope)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for other in (frame[:cut], frame + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(SealError):
            unseal(KEY, ADDRESS, other)


@given(st.binary(max_size=200))
def test_noise_has_no_seal(noise):
    with pytest.raises(SealError):
        unseal(KEY, ADDRESS, noise)


@pytest.mark.parametrize("token", [b"", b"a token of the cluster "])
def test_another_token_breaks_the_seal_and_the_version_is_named(token):
    with pytest.raises(SealError, match="protocol version 99 is not sealed with this cluster's token"):
        unseal(KEY, ADDRESS, seal(control_key(token), 99, ADDRESS, b"x"))


def test_a_frame_carried_to_another_address_has_no_seal():
    with pytest.raises(SealError):
        unseal(KEY, "tcp://127.0.0.1:6", seal(KEY, 2, ADDRESS, b"x"))


def test_address_and_envelope_cannot_lend_each_other_bytes():
    frame = seal(KEY, 2, "a", b"bc")
    with pytest.raises(SealError):
        unseal(KEY, "ab", frame[:-2] + b"c")


@given(st.lists(st.integers(1, WINDOW), max_size=200))
def test_within_the_window_each_number_is_taken_exactly_once_in_any_order(numbers):
    seen, taken = set(), ReplayWindow()
    for number in numbers:
        assert taken.take(7, number) == (number not in seen)
        seen.add(number)


@given(st.lists(st.integers(1, 1 << 63), max_size=50))
def test_no_number_is_ever_taken_twice_and_a_new_highest_always(numbers):
    seen, taken = set(), ReplayWindow()
    for number in numbers:
        is_highest = number > max(seen, default=0)
        was_taken = taken.take(7, number)
        assert was_taken <= (number not in seen)
        assert was_taken >= is_highest
        seen.add(number)


def test_a_number_too_far_back_counts_as_seen():
    taken = ReplayWindow()
    assert taken.take(7, WINDOW + 1)
    assert not taken.take(7, 1)
    assert taken.take(7, 2)


def test_senders_do_not_share_numbers_and_the_table_is_bounded():
    taken = ReplayWindow()
    for sender in range(MAX_SENDERS + 1):
        assert taken.take(sender, 1)
    assert not taken.take(MAX_SENDERS, 1)
    assert len(taken._seen) == MAX_SENDERS
