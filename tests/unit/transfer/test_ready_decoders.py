"""msgspec makes a type ready when it first decodes one, and two threads that do so at once end the process (SIGSEGV).

Sessions of a transport open in threads of their own, often at once, for example if decode has several ranks.
"""

import ast
from pathlib import Path

import pytest

from splitserve.transfer import transports

MODULES = sorted(Path(transports.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_transports_decode_by_decoders_that_were_made_when_they_were_imported(path: Path) -> None:
    late = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode"
        for keyword in node.keywords
        if keyword.arg == "type" and isinstance(keyword.value, ast.Name)
    ]
    assert late == [], f"{path.name} has types made ready by whichever session comes first, lines {late}"
