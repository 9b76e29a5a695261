"""The diagram in docs/transfer.md is the one that the table draws."""

import re
from pathlib import Path

from splitserve.transfer.state import KVPoll, diagram

PAGE = Path(__file__).parents[3] / "docs" / "transfer.md"


def test_the_diagram_in_the_docs_is_drawn_from_the_table():
    found = re.search(r"<!-- state diagram: begin -->\n```mermaid\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == diagram(), "run: python -m splitserve.transfer.state"


def test_the_diagram_shows_every_state():
    assert all(state.name.title().replace("_", "") in diagram() for state in KVPoll)
