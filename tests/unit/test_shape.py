"""Limits that keep the code base readable: words, names, lengths. `make check` runs them, too."""

import ast
import collections
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "splitserve"
MODULES = sorted(SOURCE.rglob("*.py"))
# Code that the tests share, which keeps the same limits.
SUPPORT = sorted((ROOT / "tests" / "support").rglob("*.py"))
C_FILES = sorted(p for p in (SOURCE / "_native").iterdir() if p.suffix in (".c", ".h"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TESTS = sorted({*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.*")} - set(SUPPORT))
# The language guide and this file quote the words.
QUOTES_WORDS = {ROOT / "CONTRIBUTING.md", Path(__file__)}
# Commands append sections to it.
APPENDED = ROOT / "docs" / "log.md"

PEOPLE_WORDS = re.compile(r"\b(somebody|nobody|whoever|whom|whose|everybody|anybody)\b", re.IGNORECASE)
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 10
MAX_PAGE_LINES = 250
MAX_LINE = 120
MAX_SMALL_MODULES = 10
SMALL_MODULE_LINES = 40
# Lower this figure whenever the code shrinks. The aim is 42,000.
MAX_SOURCE_LINES = 72_194


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_programs_are_not_described_as_people():
    assert not [
        (relative(path), number, line)
        for path in [*MODULES, *SUPPORT, *TESTS, *C_FILES, *PAGES]
        if path not in QUOTES_WORDS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PEOPLE_WORDS.search(line)
    ]


def test_a_public_class_name_exists_once():
    where = collections.defaultdict(list)
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(relative(path))
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_functions_are_short():
    assert not [
        (relative(path), node.name, length)
        for path in [*MODULES, *SUPPORT]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def test_constructors_have_few_parameters():
    assert not [
        (relative(path), node.lineno, count)
        for path in [*MODULES, *SUPPORT]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and node.name == "__init__"
        and (count := len(node.args.args) + len(node.args.kwonlyargs) - 1) > MAX_CONSTRUCTOR_PARAMETERS
    ]


def test_pages_are_short_and_narrow():
    pages = {path: path.read_text().splitlines() for path in PAGES if path.name != "CHANGELOG.md"}
    assert not {relative(path): len(lines) for path, lines in pages.items() if len(lines) > MAX_PAGE_LINES}
    assert not [
        (relative(path), number)
        for path, lines in pages.items()
        if path != APPENDED
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_LINE and not line.startswith("|") and "](" not in line
    ]


def test_few_small_modules_serve_one_other_module():
    names = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in MODULES}
    importers = collections.defaultdict(set)
    for importer, path in names.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                for name in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers[name].add(importer)
    small = [
        name
        for name, path in names.items()
        if len(importers[name]) == 1 and len(path.read_text().splitlines()) < SMALL_MODULE_LINES
    ]
    assert len(small) <= MAX_SMALL_MODULES, small


def test_the_source_does_not_grow():
    assert sum(len(path.read_text().splitlines()) for path in MODULES) <= MAX_SOURCE_LINES
