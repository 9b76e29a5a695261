"""A proof of the cluster token is valid for one port, one connection or request, and one attempt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.clock import ManualClock
from splitserve.process import authentication
from splitserve.process.authentication import (
    LIFETIME_SECONDS,
    AuthenticationError,
    Challenges,
    InitiatorHandshake,
    ProofVerdict,
    ResponderHandshake,
    StreamProtocol,
    answer_challenge,
    curve_keys,
    mac,
)

TOKEN = b"a token of the cluster"
REQUEST = ("GET", "/route?tp_rank=0", b"body")


def open_one(token=TOKEN):
    clock = ManualClock(100.0)
    return clock, Challenges(token, clock)


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_the_answer_to_a_challenge_is_good_once(token):
    _, challenges = open_one(token)
    proof = answer_challenge(token, challenges.issue(), *REQUEST)
    assert challenges.check(proof, *REQUEST) is ProofVerdict.GOOD
    assert challenges.check(proof, *REQUEST) is ProofVerdict.MISSING


@pytest.mark.parametrize(
    "request_", [("PUT", *REQUEST[1:]), ("GET", "/route?tp_rank=1", b"body"), ("GET", "/route?tp_rank=0", b"bodY")]
)
def test_it_is_wrong_for_any_other_request(request_):
    _, challenges = open_one()
    assert challenges.check(answer_challenge(TOKEN, challenges.issue(), *REQUEST), *request_) is ProofVerdict.WRONG


def test_it_is_wrong_under_another_token_and_costs_the_nonce():
    _, challenges = open_one()
    header = challenges.issue()
    assert challenges.check(answer_challenge(b"another", header, *REQUEST), *REQUEST) is ProofVerdict.WRONG
    assert challenges.check(answer_challenge(TOKEN, header, *REQUEST), *REQUEST) is ProofVerdict.MISSING


def test_a_nonce_that_is_too_old_or_of_another_server_proves_nothing():
    clock, challenges = open_one()
    header = challenges.issue()
    assert Challenges(TOKEN, clock).check(answer_challenge(TOKEN, header, *REQUEST), *REQUEST) is ProofVerdict.MISSING
    clock.advance(LIFETIME_SECONDS)
    assert challenges.check(answer_challenge(TOKEN, header, *REQUEST), *REQUEST) is ProofVerdict.MISSING


def test_the_table_of_nonces_is_bounded_and_the_expired_leave_it(monkeypatch):
    monkeypatch.setattr(authentication, "MAX_OUTSTANDING", 3)
    clock, challenges = open_one()
    headers = [challenges.issue() for _ in range(4)]
    verdicts = [challenges.check(answer_challenge(TOKEN, h, *REQUEST), *REQUEST) for h in headers]
    assert verdicts == [ProofVerdict.MISSING, ProofVerdict.GOOD, ProofVerdict.GOOD, ProofVerdict.GOOD]
    challenges.issue()
    clock.advance(LIFETIME_SECONDS)
    challenges.issue()
    assert len(challenges._outstanding) == 1


@given(st.text())
def test_noise_in_the_headers_is_no_proof_and_no_challenge(noise):
    _, challenges = open_one()
    assert challenges.check(noise, *REQUEST) is ProofVerdict.MISSING
    assert answer_challenge(TOKEN, noise, *REQUEST) is None


PROTOCOL = StreamProtocol("test", b"TEST", 3)


def exchange(initiator, responder, change=lambda part: part):
    """Do a handshake byte by byte. `change` alters what the initiator sends."""

    def send(data):
        return b"".join(responder.feed(data[i : i + 1]) for i in range(len(data)) if not responder.is_over)

    challenge = send(change(initiator.hello))
    send(change(initiator.answer(challenge)))
    return responder


@given(st.binary(max_size=64), st.text(max_size=60))
def test_both_ends_of_a_stream_authenticate_and_agree_on_the_name(token, name):
    responder = exchange(
        InitiatorHandshake(PROTOCOL, token, name.encode(errors="replace")), ResponderHandshake(PROTOCOL, token)
    )
    assert responder.problem is None
    assert responder.peer_name == name.encode(errors="replace").decode()


def test_an_initiator_rejects_a_responder_with_another_token():
    with pytest.raises(AuthenticationError, match="the cluster tokens differ"):
        exchange(InitiatorHandshake(PROTOCOL, TOKEN), ResponderHandshake(PROTOCOL, b"another"))


@given(st.binary(min_size=32, max_size=32))
def test_a_responder_rejects_an_initiator_that_cannot_prove_the_token(proof):
    initiator, responder = InitiatorHandshake(PROTOCOL, b"another"), ResponderHandshake(PROTOCOL, TOKEN)
    responder.feed(initiator.hello[: responder.wanted])
    responder.feed(proof)
    assert responder.peer_name is None
    assert "the cluster tokens differ" in responder.problem


def test_a_proof_is_for_one_connection_one_name_and_one_port():
    first = ResponderHandshake(PROTOCOL, TOKEN)
    initiator = InitiatorHandshake(PROTOCOL, TOKEN, b"a")
    answer = initiator.answer(first.feed(initiator.hello[:24]) + first.feed(initiator.hello[24:]))
    for protocol, hello in (
        (PROTOCOL, initiator.hello),
        (PROTOCOL, initiator.hello[:-1] + b"b"),
        (StreamProtocol("other", b"TEST", 3), initiator.hello),
    ):
        responder = ResponderHandshake(protocol, TOKEN)
        responder.feed(hello[:24])
        responder.feed(hello[24:])
        responder.feed(answer)
        assert responder.problem is not None
    first.feed(answer)
    assert first.peer_name == "a"


def test_a_responder_cannot_be_made_to_prove_itself_to_its_own_proof():
    """A proof names its end, so the responder's proof returned to it is no answer."""
    initiator, responder = InitiatorHandshake(PROTOCOL, TOKEN), ResponderHandshake(PROTOCOL, TOKEN)
    challenge = responder.feed(initiator.hello)
    responder.feed(challenge[-32:])
    assert responder.problem is not None


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (StreamProtocol("test", b"TEST", 99), "test protocol version {} against {}: run the same Splitserve release"),
        (StreamProtocol("test", b"ELSE", 3), "the peer does not use Splitserve's test protocol"),
    ],
)
def test_both_ends_name_another_version_or_protocol(other, problem):
    initiator, responder = InitiatorHandshake(other, TOKEN, b"name"), ResponderHandshake(PROTOCOL, TOKEN)
    challenge = responder.feed(initiator.hello[:24])
    responder.feed(initiator.hello[24:])
    assert problem.format(3, 99) in responder.problem
    if challenge:
        with pytest.raises(AuthenticationError, match=problem.format(99, 3)):
            initiator.answer(challenge)


def test_a_name_that_is_too_long_is_rejected_unread():
    responder = ResponderHandshake(PROTOCOL, TOKEN)
    responder.feed(InitiatorHandshake(PROTOCOL, TOKEN, b"x" * 257).hello[:24])
    assert "257 bytes" in responder.problem


def sealed_pair():
    initiator, responder = InitiatorHandshake(PROTOCOL, TOKEN), ResponderHandshake(PROTOCOL, TOKEN)
    exchange(initiator, responder)
    return initiator.seals(), responder.seals()


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_frames_pass_in_order_and_in_both_directions(payloads):
    ours, theirs = sealed_pair()
    for payload in payloads:
        assert theirs.is_valid(ours.seal(payload), payload)
        assert ours.is_valid(theirs.seal(payload), payload)


def test_a_changed_repeated_skipped_or_returned_frame_has_no_valid_seal():
    ours, theirs = sealed_pair()
    assert not theirs.is_valid(ours.seal(b"a"), b"b")
    ours, theirs = sealed_pair()
    seal = ours.seal(b"a")
    assert theirs.is_valid(seal, b"a")
    assert not theirs.is_valid(seal, b"a")
    ours, theirs = sealed_pair()
    ours.seal(b"a")
    assert not theirs.is_valid(ours.seal(b"b"), b"b")
    ours, _ = sealed_pair()
    assert not ours.is_valid(ours.seal(b"a"), b"a")


@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_two_lists_of_fields_have_one_mac_only_if_they_are_equal(one, other):
    assert (mac(b"key", *one) == mac(b"key", *other)) == (one == other)


def test_curve_keys_differ_by_token_purpose_and_salt_and_do_not_print_their_secret():
    keys = [curve_keys(TOKEN, "a"), curve_keys(TOKEN, "b"), curve_keys(b"other", "a"), curve_keys(TOKEN, "a", b"1")]
    assert len({k.public for k in keys} | {k.secret for k in keys}) == 8
    assert curve_keys(TOKEN, "a") == keys[0]
    assert keys[0].secret.decode() not in repr(keys[0])
