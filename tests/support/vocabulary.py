"""The tables of docs/vocabulary.md and docs/vocabulary-more.md."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((_DOCS / name).read_text() for name in ("vocabulary.md", "vocabulary-more.md"))


class Mark(enum.StrEnum):
    SERVES = "serves"
    DONE_BY = "done by"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Row:
    # Text of the first column, and the names in it.
    part: str
    mark: Mark
    # What the part needs, such as a GPU. Empty: nothing.
    needs: str
    # Symbols here, without those in the remark.
    symbols: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.part)


def rows() -> list[Row]:
    """Return the rows of all tables. Raises ValueError for an unknown mark."""
    found = []
    for line in TEXT.splitlines():
        if line.startswith("| ") and not line.startswith("| part "):
            part, mark, symbols, _ = (cell.strip() for cell in line.strip("|").split("|"))
            mark, _, needs = mark.partition(", ")
            found.append(Row(part, Mark(mark), needs, tuple(re.findall(r"`(splitserve[\w.]*:[\w.]+)`", symbols))))
    return found
