"""Tables and progress lines on standard output. Tables have the width of the terminal; without one they are not cut."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

# Columns of a file or a pipe: large enough to cut nothing.
_WIDTH_ELSEWHERE = 1000


def standard_output(stream: TextIO | None = None) -> Console:
    """Return the console of results. `stream`: another form of standard output."""
    is_fitted = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return Console(file=stream, width=None if is_fitted else _WIDTH_ELSEWHERE, emoji=False)


class _Nowhere(io.TextIOBase):
    """Text stream that drops everything."""

    def write(self, text: str) -> int:
        return len(text)


class LossyOutput:
    """Text stream that drops what cannot be written: the disk is full, or the terminal or the reader is gone."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` None: the process was started without it, and all is dropped."""
        self._stream = _Nowhere() if stream is None else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def progress(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that updates the progress text.

    In a terminal one line changes. Otherwise each text that differs from the previous one is a line of its own.
    """
    if console.is_terminal:
        with console.status(escape(text)) as status:
            yield lambda text: status.update(escape(text))
        return
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text != last:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        last = text

    show(text)
    yield show
