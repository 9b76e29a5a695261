"""Sources of the prompts of checks and benchmarks: plain English text of some 470 tokens, and JSON Lines files."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from splitserve.core.errors import ConfigError, clause

PASSAGE = """\
The harbour of the small town faces east, so the first light of the day falls on the boats before it reaches any \
house. An hour before sunrise the baker has already lit his oven, and the smell of bread drifts down the hill and \
over the water. Fishermen drink their coffee standing up. They talk about the wind, about the price of diesel, and \
about a whale that the baker's cousin claims to have seen beyond the lighthouse last week. No one believes it, but \
everyone looks.

Anna has kept the lighthouse for nineteen years. The lamp turns by itself now, and a computer in the capital would \
know at once if it failed, yet she still climbs the two hundred and twelve steps every evening, because she likes \
to see for herself. In a grey notebook she writes down the weather, the ships that pass, and now and then a \
sentence that has nothing to do with either. Some day, she says, it may become a book, or perhaps only a very long \
letter to no one.

On Saturdays there is a market in the square in front of the church. Farmers bring potatoes, onions, honey, eggs \
and cheese, and an old man sells clocks that he has repaired. If you ask him why a clock stops, he will tell you \
that most of them are not broken at all; they are only dirty, and a machine that is cleaned and looked at once a \
year will outlive its owner. Children stand around his table and wait for the full hour, when all the clocks \
strike, never quite together.

In October the storms begin. The ferry stays on the far side of the bay, the school closes early, and the radio \
repeats the same warning every thirty minutes. People carry their chairs inside and tie down whatever could fly \
away. When the power goes out, neighbours who have not spoken since spring sit around one table with candles and a \
pot of soup, and a guest finds a guitar. In the morning the beach looks like a different place: new stones, new \
driftwood, and once a whole wooden door, painted blue, with its key still in the lock. It stands in the museum now. \
No one has come to ask for it, and the key, which was cleaned and oiled by the man who repairs the clocks, still \
turns without a sound.
"""


def text_of_option(path: Path | None) -> str:
    """Return the text of --text, or the built-in one. Raises ConfigError."""
    try:
        return PASSAGE if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read ({clause(error)}): name a UTF-8 file") from error


def read_json_lines(path: Path, line_type: Any, option: str, form: str, limit: int | None = None) -> list[Any]:
    """Return the first `limit` lines of a file, or all. `form`: of a line, in words. Raises ConfigError.

    Errors have the option, the file and the line. Empty lines are skipped.
    """
    found = []
    try:
        with path.open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for number, line in islice(lines, limit):
                try:
                    found.append(msgspec.json.decode(line, type=line_type))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{option} {path}, line {number}: {clause(error)}: give {form}") from error
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror}): name another file") from error
    if not found:
        raise ConfigError(f"{option} {path}: it has no request: give {form}")
    return found
