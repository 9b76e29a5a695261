"""Every symbol that docs/vocabulary.md names exists."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "vocabulary.md").read_text()
SYMBOLS = sorted(set(re.findall(r"`(splitserve[\w.]*:[\w.]+)`", PAGE)))


def test_the_table_is_there():
    assert len(SYMBOLS) > 35


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_symbol_of_the_vocabulary_resolves(symbol):
    module, _, path = symbol.partition(":")
    assert reduce(getattr, path.split("."), importlib.import_module(module)) is not None
