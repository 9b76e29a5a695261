"""Fields of a body that the API does not define: a warning for the client and the log, or an error in strict mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any

WARNING_HEADER = "x-splitserve-warning"
# Fields of the OpenAI API that change nothing in the output of any server.
_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "extra_body"}
)
# Unknown fields named in one warning, and characters of a name.
MAX_NAMED = 8
_MAX_NAME_CHARS = 64


def unknown_fields(body: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> list[str]:
    """Return a description of each unknown field with a value, with the name that was probably meant.

    `prefix`: name of the object that holds them, with a dot.
    """
    names = list(known)
    return [f"{prefix}{_described(name, names)}" for name in islice(_unknown(body, names), MAX_NAMED)]


def warning(unknown: Sequence[str]) -> str:
    """Return the text about these fields, in ASCII for a header."""
    return f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}"


def _unknown(body: Mapping[str, Any], known: Iterable[str]) -> Iterator[str]:
    accepted = _WITHOUT_EFFECT.union(known)
    return (name for name, value in body.items() if value is not None and name not in accepted)


def _described(name: str, known: Sequence[str]) -> str:
    text = ascii(name[:_MAX_NAME_CHARS])[1:-1]
    near = get_close_matches(name, known, n=1) if len(name) <= _MAX_NAME_CHARS else []
    return f"{text} (did you mean {near[0]}?)" if near else text
