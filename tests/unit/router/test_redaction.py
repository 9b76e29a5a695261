"""Addresses of workers are removed from messages, and nothing else is."""

from __future__ import annotations

import json

import pytest

from splitserve.router.upstream import redacted, without_addresses

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


def test_only_the_message_of_an_error_changes() -> None:
    body = json.dumps({"error": {"message": "at 10.0.0.1:80", "code": "peer_lost"}}).encode()
    assert json.loads(redacted(body, [])) == {"error": {"message": f"at {SHOWN}", "code": "peer_lost"}}
    for other in (b"no JSON 10.0.0.1:80", b'{"text": "a"}', b"[]", b'{"error": {"message": null}}'):
        assert redacted(other, []) == other
