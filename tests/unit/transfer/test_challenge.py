"""A proof of the cluster token is for one nonce and one request, and a nonce for one attempt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.clock import ManualClock
from splitserve.transfer import challenge
from splitserve.transfer.challenge import LIFETIME_SECONDS, Challenges, ProofRole, answer

TOKEN = b"a token of the cluster"
REQUEST = ("GET", "/route?tp_rank=0", b"body")


def open_one(token=TOKEN):
    clock = ManualClock(100.0)
    return clock, Challenges(token, clock)


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_the_answer_to_a_challenge_is_good_once(token):
    _, challenges = open_one(token)
    proof = answer(token, challenges.issue(), *REQUEST)
    assert challenges.check(proof, *REQUEST) is ProofRole.GOOD
    assert challenges.check(proof, *REQUEST) is ProofRole.MISSING


@pytest.mark.parametrize(
    "request_", [("PUT", *REQUEST[1:]), ("GET", "/route?tp_rank=1", b"body"), ("GET", "/route?tp_rank=0", b"bodY")]
)
def test_it_is_wrong_for_any_other_request(request_):
    _, challenges = open_one()
    assert challenges.check(answer(TOKEN, challenges.issue(), *REQUEST), *request_) is ProofRole.WRONG


def test_it_is_wrong_under_another_token_and_costs_the_nonce():
    _, challenges = open_one()
    header = challenges.issue()
    assert challenges.check(answer(b"another", header, *REQUEST), *REQUEST) is ProofRole.WRONG
    assert challenges.check(answer(TOKEN, header, *REQUEST), *REQUEST) is ProofRole.MISSING


def test_a_nonce_that_is_too_old_or_of_another_server_proves_nothing():
    clock, challenges = open_one()
    header = challenges.issue()
    assert Challenges(TOKEN, clock).check(answer(TOKEN, header, *REQUEST), *REQUEST) is ProofRole.MISSING
    clock.advance(LIFETIME_SECONDS)
    assert challenges.check(answer(TOKEN, header, *REQUEST), *REQUEST) is ProofRole.MISSING


def test_the_table_of_nonces_is_bounded_and_the_expired_leave_it(monkeypatch):
    monkeypatch.setattr(challenge, "MAX_OUTSTANDING", 3)
    clock, challenges = open_one()
    headers = [challenges.issue() for _ in range(4)]
    verdicts = [challenges.check(answer(TOKEN, h, *REQUEST), *REQUEST) for h in headers]
    assert verdicts == [ProofRole.MISSING, ProofRole.GOOD, ProofRole.GOOD, ProofRole.GOOD]
    challenges.issue()
    clock.advance(LIFETIME_SECONDS)
    challenges.issue()
    assert len(challenges._outstanding) == 1


@given(st.text())
def test_noise_in_the_headers_is_no_proof_and_no_challenge(noise):
    _, challenges = open_one()
    assert challenges.check(noise, *REQUEST) is ProofRole.MISSING
    assert answer(TOKEN, noise, *REQUEST) is None
