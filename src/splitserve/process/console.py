"""Tables and progress lines on standard output. Tables have the width of the terminal; without one they are not cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.markup import escape

# Columns of a file or a pipe: large enough to cut nothing.
_WIDTH_ELSEWHERE = 1000


def standard_output() -> Console:
    is_told = "COLUMNS" in os.environ
    return Console(width=None if is_told or sys.stdout.isatty() else _WIDTH_ELSEWHERE, emoji=False)


class LastingConsole(Console):
    """Console of a process that goes on if its messages cannot be written."""

    def print(self, *objects: Any, **options: Any) -> None:
        # A full disk.
        with suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Print nothing more. The base class ends the process."""
        self.quiet = True


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
