"""Section of a documentation page with a benchmark's figures. Only the text between two marks is replaced.

The marks <!-- NAME --> and <!-- /NAME --> are on separate lines.
"""

from __future__ import annotations

from pathlib import Path

from splitserve.core.errors import ConfigError


def check_page(page: Path, name: str) -> None:
    """Check that the page has the section, before minutes of measuring. Raises ConfigError."""
    _parts(page, name)


def replace_section(page: Path, name: str, text: str) -> None:
    """Replace the section's text. Raises ConfigError if the page has no such section."""
    before, after = _parts(page, name)
    try:
        page.write_text(f"{before}\n\n{text.strip()}\n\n{after}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {page}: cannot be written ({error.strerror}): name another file") from error


def _parts(page: Path, name: str) -> tuple[str, str]:
    """Return the text up to and including the first mark, and the text from the second mark on."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {page}: cannot be read ({error.strerror}): name a page that is there") from error
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ConfigError(f"--page {page}: it has no section between {begin} and {end}: add these two lines")
    before, _, rest = text.partition(begin)
    return before + begin, end + rest.partition(end)[2]
