"""Addresses of workers are removed from messages, and nothing else is."""

from __future__ import annotations

import json

import pytest

from splitserve.core.request import DisaggregationMode
from splitserve.router.upstream import FailureCause, UpstreamError, message_in, without_addresses
from splitserve.router.worker import Worker

SHOWN = "(address: see the router's log)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lost http://10.0.0.1:8000: no heartbeat", f"lost {SHOWN}: no heartbeat"),
        ("see https://w-1.internal:1/health.", f"see {SHOWN}."),
        ("lost 10.0.0.1:8000, 10.0.0.2:8001", f"lost {SHOWN}, {SHOWN}"),
        ("at [fd00::1]:8998", f"at {SHOWN}"),
        ("prefill w-1:8998, data parallel rank 1", f"prefill {SHOWN}, data parallel rank 1"),
        ("w-10:8998 is not of this cluster", "w-10:8998 is not of this cluster"),
        ("room 5: try 3 of 4, 1.5 s; version 1.2.3.4", "room 5: try 3 of 4, 1.5 s; version 1.2.3.4"),
    ],
)
def test_addresses_are_replaced(text: str, expected: str) -> None:
    assert without_addresses(text, ["w-1"]) == expected


def redacted(body: bytes, cause: FailureCause = FailureCause.WORKER) -> bytes:
    return UpstreamError(Worker("http://w", DisaggregationMode.DECODE), 500, body, cause).redacted([])


def test_only_the_message_of_an_error_changes() -> None:
    body = json.dumps({"error": {"message": "at 10.0.0.1:80", "code": "peer_lost"}}).encode()
    assert json.loads(redacted(body)) == {"error": {"message": f"at {SHOWN}", "code": "peer_lost"}}
    for other in (b"no JSON 10.0.0.1:80", b'{"text": "a"}', b"[]", b'{"error": {"message": null}}'):
        assert redacted(other) == other
    # The message is about the request, which may contain an address.
    assert redacted(body, FailureCause.REQUEST) == body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "no\\nmemory\\u0000", "code": "x"}}', "no memory "),
        (b"<html>\nno JSON", "<html> no JSON"),
        (b"", ""),
        (b'{"error": {"message": "' + b"a" * 400 + b'"}}', f"{'a' * 147} ... {'a' * 147}"),
        (b"b" * 1000, f"{'b' * 147} ... {'b' * 147}"),
    ],
)
def test_the_message_for_a_trace_is_one_short_line(body: bytes, expected: str) -> None:
    assert message_in(body) == expected
