"""Check of the references in a JSON schema: each must point to another place in the same schema.

The grammar library does not constrain the output if it cannot resolve a reference, so such schemas are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from splitserve.core.errors import InvalidRequestError

# Keywords with data as their value. "$ref" in that data is an ordinary name.
_DATA = frozenset(["const", "default", "enum", "example", "examples"])
# Keywords with an object of schemas by name as their value.
_NAMED_SCHEMAS = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
# References that the grammar library ignores.
_UNSUPPORTED = ("$dynamicRef", "$recursiveRef")


def check_references(schema: object, param: str) -> None:
    """Raise InvalidRequestError that names the place of a reference which does not lead into `schema`."""
    for path, keyword, target in _references(schema, "#"):
        place = f"{param} has a {keyword} at {path}"
        if keyword in _UNSUPPORTED:
            raise InvalidRequestError(f"{place}: use $ref with a path like #/$defs/name", param=param)
        if not isinstance(target, str):
            raise InvalidRequestError(f"{place} that is not a string: send a path like #/$defs/name", param=param)
        if target != "#" and not target.startswith("#/"):
            raise InvalidRequestError(
                f"{place} to {target[:200]!r}, outside the schema: copy the definition into $defs and refer to it as "
                "#/$defs/name",
                param=param,
            )
        if not _leads_somewhere(schema, target):
            raise InvalidRequestError(f"{place} to {target[:200]!r}, which the schema does not define", param=param)


def check_tag_references(value: object, param: str) -> None:
    """Check each JSON schema inside a structural tag."""
    if isinstance(value, list):
        for child in value:
            check_tag_references(child, param)
    elif isinstance(value, dict):
        for key, child in value.items():
            if key in ("json_schema", "schema"):
                check_references(child, param)
            else:
                check_tag_references(child, param)


def _references(value: object, path: str) -> Iterator[tuple[str, str, object]]:
    """Yield (path of the schema, keyword, value) of each reference below `value`, a schema or a list of schemas."""
    if isinstance(value, list):
        for i, child in enumerate(value):
            yield from _references(child, f"{path}/{i}")
    elif isinstance(value, dict):
        for keyword, child in value.items():
            if keyword == "$ref" or keyword in _UNSUPPORTED:
                yield path, keyword, child
            elif keyword in _NAMED_SCHEMAS and isinstance(child, dict):
                for name, schema in child.items():
                    yield from _references(schema, f"{path}/{keyword}/{name}")
            elif keyword not in _DATA:
                yield from _references(child, f"{path}/{keyword}")


def _leads_somewhere(schema: Any, target: str) -> bool:
    """Return whether the JSON pointer after "#" leads to a value in `schema`."""
    for escaped in target.split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            if not name.isdecimal() or int(name) >= len(schema):
                return False
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return False
    return True
