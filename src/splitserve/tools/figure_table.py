"""Tables of figures for terminals of any width. rich would cut the figures of a table that is too wide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

# Minimum width of the flexible column. In a narrower terminal, rows continue on the next line.
_LEAST_WIDTH = 8


@dataclass(frozen=True, slots=True)
class FlexibleColumn:
    """Column that becomes narrower, because it has no figures."""

    index: int
    # Width in a wide terminal, and the width from which notes move below their rows instead.
    width: int
    width_beside_notes: int


class FigureTable:
    """Rows with figures in full, and a note per row: in the last column, or on a line below if the terminal is narrow.

    `left`: titles of left-aligned columns. `note`: title of the notes.
    """

    def __init__(self, titles: Sequence[str], flexible: FlexibleColumn, left: Collection[str], note: str) -> None:
        self._titles = titles
        self._flexible = flexible
        self._left = left
        self._note = note
        self._rows: list[tuple[list[Text | Callable[[int], Text]], Text]] = []

    def add(self, cells: Sequence[str | Text | Callable[[int], Text]], note: Text) -> None:
        """Add a row. The flexible cell is a function that returns it for a width."""
        self._rows.append(([Text(cell) if isinstance(cell, str) else cell for cell in cells], note))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        titles: list[Text | Callable[[int], Text]] = [Text(title) for title in self._titles]
        rows = [(titles, Text(self._note)), *self._rows]
        columns = zip(*(cells for cells, _ in rows), strict=True)
        widths = [max(cell.cell_len for cell in column if isinstance(cell, Text)) for column in columns]
        flexible, notes = self._flexible, max((note.cell_len for _, note in self._rows), default=0)
        # Between columns there is one space.
        room = options.max_width - sum(widths) + widths[flexible.index] - len(widths) + 1
        beside = room - 1 - max(notes, cell_len(self._note))
        is_beside = notes == 0 or beside >= flexible.width_beside_notes
        widths[flexible.index] = max(_LEAST_WIDTH, min(flexible.width, beside if is_beside and notes else room))
        for number, (cells, note) in enumerate(rows):
            line = Text(" ").join(map(self._aligned, self._titles, cells, widths))
            if is_beside and notes:
                line = Text(" ").join([line, note])
            line.rstrip()
            if number == 0:
                line.stylize("dim")
            yield line
            if not is_beside and number > 0 and note:
                yield Padding(note, (0, 0, 0, 2), expand=False)

    def _aligned(self, title: str, cell: Text | Callable[[int], Text], width: int) -> Text:
        aligned = cell.copy() if isinstance(cell, Text) else cell(width)
        aligned.align("left" if title in self._left else "right", width)
        return aligned


def shortened(text: str, width: int) -> Text:
    """Return a name with at most `width` characters. Its middle is replaced, because ids differ in their ends."""
    tail = (width - 1) // 2
    return Text(text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}")
