"""The diagrams in docs/transfer.md are the ones that the tables draw."""

import re
from pathlib import Path

import pytest

from splitserve.transfer.state import RECEIVER, SENDER, diagram

PAGE = Path(__file__).parents[3] / "docs" / "transfer.md"
TABLES = pytest.mark.parametrize(("side", "table"), [("sender", SENDER), ("receiver", RECEIVER)])


@TABLES
def test_the_diagram_in_the_docs_is_drawn_from_the_table(side, table):
    pattern = rf"<!-- {side} diagram: begin -->\n```mermaid\n(.*?)```\n"
    found = re.search(pattern, PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == diagram(table), "run: python -m splitserve.transfer.state"


@TABLES
def test_the_diagram_shows_every_state(side, table):
    assert all(state.name.title().replace("_", "") in diagram(table) for state in table)
