from __future__ import annotations

import pytest
from rich.table import Table

from splitserve.launch.console import standard_output


def table() -> Table:
    table = Table("what", "how much")
    table.add_row("a long name of a case " * 10, "a number that matters")
    return table


def test_what_goes_to_no_terminal_is_cut_nowhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    standard_output().print(table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "a number that matters" in lines[3]
    assert lines[3].count("a long name of a case") == 10
    assert max(map(len, lines)) < 300


def test_a_width_that_is_asked_for_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    standard_output().print(table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
