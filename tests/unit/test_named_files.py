"""Files that pages and docstrings name in backticks exist. The log and the decisions name files of their time."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "splitserve"
READERS = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "reference").glob("*.md"),
    *SOURCE.rglob("*.py"),
    *(ROOT / "tests" / "support").rglob("*.py"),
]
FILE = re.compile(r"`([\w./-]+\.(?:py|c|h))`")
# Placeholder in instructions.
PLACEHOLDER = "NAME.py"


def existing() -> set[str]:
    """Return the endings of all paths in source and tests, e.g. loops.py and scheduler/loops.py."""
    found = set()
    for folder in (ROOT / "src", ROOT / "tests", ROOT / "bench"):
        for path in folder.rglob("*.[pch]*"):
            parts = path.relative_to(ROOT).parts
            found |= {"/".join(parts[i:]) for i in range(len(parts))}
    return found


def test_named_files_exist():
    found = existing()
    assert not [
        (str(path.relative_to(ROOT)), name)
        for path in READERS
        for name in FILE.findall(path.read_text())
        if name not in found and not name.endswith(PLACEHOLDER)
    ]


def test_the_site_lists_every_page():
    docs = ROOT / "docs"
    listed = re.findall(r" ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert not {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - set(listed)
