"""Every symbol of the vocabulary exists, and its row has a mark that holds: `test_vocabulary_serves.py` runs the parts.

A mark with an addition, such as "on a GPU", is checked here: other production code refers to the symbol.
"""

import functools
import re

import pytest

from splitserve import cli
from splitserve.transfer.transports import missing
from support.evidence import Place, Symbol, all_places, is_loaded
from support.vocabulary import TEXT, Mark, rows

SYMBOLS = sorted(set(re.findall(r"`(splitserve[\w.]*:[\w.]+)`", TEXT)))
ROWS = rows()
CONDITIONAL = sorted({symbol for row in ROWS if row.needs for symbol in row.symbols})


@functools.cache
def places() -> set[Place]:
    return all_places()


def is_benchmark(symbol: str) -> bool:
    """Return whether it is the function of a command that measures: found by its name."""
    return symbol.partition(":bench_")[2] in {*cli._BENCHES, "chaos"}


def skip_if_missing(symbol: str) -> None:
    """Skip the test of a symbol in a module that imports an optional library which this machine lacks."""
    for backend in ("mooncake", "nixl"):
        if f".transports.{backend}" in symbol and (problem := missing(backend)):
            pytest.skip(problem)


def test_the_tables_are_there():
    assert len(SYMBOLS) > 100
    assert {row.mark for row in ROWS} == set(Mark)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_symbol_of_the_vocabulary_resolves(symbol):
    skip_if_missing(symbol)
    assert Symbol.of(symbol).target is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.part)
def test_a_row_has_the_symbols_of_its_mark(row):
    if row.mark is Mark.NOT_BUILT:
        assert not row.symbols
        return
    assert row.symbols
    if row.mark is Mark.SERVES:
        own = {symbol.rpartition(":")[2].rpartition(".")[2] for symbol in row.symbols}
        assert {name.rpartition(".")[2] for name in row.names} <= own


@pytest.mark.parametrize("symbol", CONDITIONAL)
def test_other_production_code_refers_to_a_symbol_that_needs_something(symbol):
    skip_if_missing(symbol)
    assert is_benchmark(symbol) or is_loaded(Symbol.of(symbol), places())


def test_a_symbol_that_only_its_own_code_names_is_no_evidence():
    own = Symbol.of("splitserve.scheduler.roles.decode:DecodeTransferQueue")
    assert is_loaded(own, places())
    assert not is_loaded(own, {(own.file, "<module>"), (own.file, "DecodeTransferQueue.num_tokens_pre_allocated")})
