from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from splitserve.process.console import LossyOutput, progress, standard_output


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


def test_where_lines_stay_progress_is_a_line_for_each_new_text() -> None:
    written = io.StringIO()
    with progress(Console(file=written), "one [of] two") as show:
        for text in ("two", "two", "one [of] two"):
            show(text)
    assert written.getvalue().splitlines() == ["one [of] two", "two", "one [of] two"]


def test_in_a_terminal_progress_is_one_line_that_goes() -> None:
    written = io.StringIO()
    with progress(Console(file=written, force_terminal=True, width=40), "one") as show:
        show("two [of] two")
    assert "two [of] two" in written.getvalue()
    # One up, and the line erased.
    assert written.getvalue().endswith("\x1b[1A\x1b[2K")


def test_text_that_looks_like_an_emoji_code_is_printed_as_it_is(capsys):
    standard_output().print("job:100:id:a")
    assert capsys.readouterr().out == "job:100:id:a\n"


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), OSError(28, "No space left")])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_messages_that_cannot_be_written_are_dropped(error, is_terminal):
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise error

        def flush(self) -> None:
            raise error

    console = Console(file=LossyOutput(Broken()), force_terminal=is_terminal)
    with progress(console, "one") as show:
        show("two")
        console.print("three")
    assert not console._buffer


def test_without_a_stream_nothing_is_written(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    standard_output(LossyOutput(None)).print("text")
