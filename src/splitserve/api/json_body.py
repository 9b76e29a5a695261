"""JSON bodies of requests: any bytes in, an object or an InvalidRequestError out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec

from splitserve.core.config import LimitsConfig
from splitserve.core.errors import InvalidRequestError

_JSON_TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}


def parse_object(raw: bytes, limits: LimitsConfig) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises InvalidRequestError."""
    depth_problem = f"the body is nested deeper than {limits.max_json_depth} levels: flatten it"
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidRequestError(depth_problem) from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8: send JSON in UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body is a JSON {json_type(body)}: send an object")
    if _depth(body, limits.max_json_depth + 1) > limits.max_json_depth:
        raise InvalidRequestError(depth_problem)
    return body


def json_type(value: object) -> str:
    """Return JSON's name for the type of a decoded value."""
    return _JSON_TYPES[type(value)]


def _depth(value: Any, at_most: int) -> int:
    """Return the number of nested levels, counted up to `at_most`."""
    level: list[Any] = [value]
    depth = 0
    while level and depth < at_most:
        depth += 1
        children: Iterable[Any] = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [child for child in children if isinstance(child, dict | list)]
    return depth
