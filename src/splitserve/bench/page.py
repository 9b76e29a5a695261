"""A page of the documentation that holds a benchmark's figures: the part between two marks is replaced, the rest kept.

<!-- NAME --> and <!-- /NAME --> stand on lines of their own.
"""

from __future__ import annotations

from pathlib import Path

from splitserve.errors import ConfigError


def check_page(page: Path, name: str) -> None:
    """Before minutes of measuring. Raises ConfigError."""
    _parts(page, name)


def replace_section(page: Path, name: str, text: str) -> None:
    """Raises ConfigError where the page has no such section."""
    before, after = _parts(page, name)
    try:
        page.write_text(f"{before}\n\n{text.strip()}\n\n{after}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {page}: cannot be written ({error.strerror}): name another file") from error


def _parts(page: Path, name: str) -> tuple[str, str]:
    """Up to and with the first mark, from the second on."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {page}: cannot be read ({error.strerror}): name a page that is there") from error
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ConfigError(f"--page {page}: it has no section between {begin} and {end}: add these two lines")
    before, _, rest = text.partition(begin)
    return before + begin, end + rest.partition(end)[2]
