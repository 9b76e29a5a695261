from __future__ import annotations

import pytest

from splitserve.core.errors import ConfigError
from splitserve.deploy.config import load_yaml


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\n", None),
        ("", None),
        ("- a\n- a\n", None),
        ("a: 1\nb: 2\na: 3\n", ("a", 3)),
        ("a: 1\n'a': 2\n", ("a", 2)),
        ("1: x\n'1': y\n", None),
        ("pools:\n  decode:\n    replicas: 1\n    replicas: 2\n", ("replicas", 4)),
        ("a: [{b: 1, c: 2}, {b: 1,\n  b: 2}]\n", ("b", 2)),
        ("a: {x: 1}\nb: {x: 1}\n", None),
        ("a: &one {x: 1}\nb: *one\nc: *one\n", None),
        ("a: &self [*self]\n", None),
        ("a: &one {x: 1}\nb: &two {<<: *one, x: 2}\nc: {<<: *two, x: 3}\n", None),
    ],
)
def test_the_second_occurrence_of_a_key_is_found(text: str, expected: tuple[str, int] | None) -> None:
    if expected is None:
        load_yaml(text.encode(), "FILE", "")
        return
    key, line = expected
    with pytest.raises(ConfigError, match=f"^FILE, line {line}: the key '{key}' occurs twice; keep one of them$"):
        load_yaml(text.encode(), "FILE", "")
