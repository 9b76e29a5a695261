"""Standard output for tables: as wide as the terminal, and where it goes elsewhere, as wide as they are."""

from __future__ import annotations

import os
import sys

from rich.console import Console

# Columns of a file or a pipe: nothing is cut, and nothing is filled up to it.
_WIDTH_ELSEWHERE = 1000


def standard_output() -> Console:
    is_told = "COLUMNS" in os.environ
    return Console(width=None if is_told or sys.stdout.isatty() else _WIDTH_ELSEWHERE)
