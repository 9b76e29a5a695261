"""Tests of the trace that follows a worker's whole answer."""

from __future__ import annotations

import pytest

from splitserve.api.responses import split_trace, with_trace

_TEXT = b'{"text": "\\n:trace x\\n\\n"}'


@pytest.mark.parametrize("body", [b"", b"{}", _TEXT, b'{\n "text": "x"\n}\n', b"[]\n\n", b"\n\n"])
def test_an_answer_and_its_trace_are_separated_again(body: bytes):
    assert split_trace(with_trace(body, b'[1,"x"]')) == (body, b'[1,"x"]')


@pytest.mark.parametrize("body", [b"", b"\n", b"\n\n", b"{}", b"[]\n\n", b'{\n "text": ":trace x"\n}\n\n'])
def test_an_answer_without_a_trace_is_unchanged(body: bytes):
    assert with_trace(body, None) == body
    assert split_trace(body) == (body, b"")
