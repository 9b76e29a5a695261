"""Tables on standard output, as wide as the terminal, elsewhere as wide as they are; and how far something is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

# Columns of a file or a pipe: nothing is cut, and nothing is filled up to it.
_WIDTH_ELSEWHERE = 1000


def standard_output() -> Console:
    is_told = "COLUMNS" in os.environ
    return Console(width=None if is_told or sys.stdout.isatty() else _WIDTH_ELSEWHERE)


@contextmanager
def progress(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """How far something is, to be told anew with what is yielded: in a terminal one line that changes, elsewhere a line
    for each text that differs from the one before.
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
