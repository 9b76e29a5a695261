"""Markdown for the sections that reports append to a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that ends with a newline."""
    lines = [_line(header), "|---" * len(header) + "|", *(_line(row) for row in rows)]
    return "\n".join(lines) + "\n"


def listed(facts: Mapping[str, str]) -> str:
    """Return facts in one line."""
    return "; ".join(f"{name}: {value}" for name, value in facts.items())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
