"""Texts about the life of a serving process."""

from __future__ import annotations

import json
import shlex

import pytest

from splitserve.process.lifecycle import request_hint


@pytest.mark.parametrize(("has_keys", "num_headers"), [(False, 1), (True, 2)])
def test_the_hint_is_a_chat_request_for_a_shell(has_keys: bool, num_headers: int) -> None:
    ready, call = request_hint("https://h:1", "it's a model", has_keys=has_keys)
    assert ready == "ready at https://h:1 (OpenAI API at https://h:1/v1)"
    curl, url, *headers, option, body = shlex.split(call)
    assert (curl, url, option) == ("curl", "https://h:1/v1/chat/completions", "-d")
    assert headers.count("-H") == num_headers
    assert ("Authorization: Bearer KEY" in headers) is has_keys
    assert json.loads(body)["model"] == "it's a model"
