"""The bar shows the number of ended requests if the output is a terminal."""

from __future__ import annotations

import pytest

from splitserve.core.errors import InvalidRequestError
from splitserve.offline.calls import Output
from splitserve.offline.runs import progress_bar

ENDS = [Output("a", (1, 2, 3), "stop", (), 1, 0), InvalidRequestError("too bad")]


def shown(capsys: pytest.CaptureFixture[str], *, progress: bool = True, num_prompts: int = 2) -> str:
    with progress_bar(num_prompts, progress=progress) as on_end:
        for end in ENDS:
            on_end(end)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_terminal_shows_how_many_have_ended_and_how(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(capsys)
    assert "2/2" in text
    assert "3 tokens, 1 failed" in text


def test_it_is_off_where_nobody_sees_it_or_wants_it_or_has_one_prompt(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert shown(capsys) == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert shown(capsys, progress=False) == ""
    assert shown(capsys, num_prompts=1) == ""
