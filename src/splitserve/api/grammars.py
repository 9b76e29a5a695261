"""Conversion of a request's output constraints to a GrammarSpec, or an InvalidRequestError that names the field.

This module checks only the outer form: one constraint at a time, valid JSON, depth and references. The compiler
checks the grammar itself, before the request is scheduled or paired. Each reference in a JSON schema must point to
another place in the same schema: the grammar library does not constrain the output if it cannot resolve one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from splitserve.api.schemas import OpenAIBody, SamplingFields
from splitserve.api.validation import json_type
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind, GrammarSpec

# Keywords with data as their value. "$ref" in that data is an ordinary name.
_DATA = frozenset(["const", "default", "enum", "example", "examples"])
# Keywords with an object of schemas by name as their value.
_NAMED_SCHEMAS = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
# References that the grammar library ignores.
_UNSUPPORTED = ("$dynamicRef", "$recursiveRef")
# The time of a compiler grows with the square of the depth.
MAX_GRAMMAR_DEPTH = 64
# Digits of the largest list index that a $ref may contain.
_MAX_INDEX_DIGITS = 9
_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
_SCHEMA_PATH = "response_format.json_schema.schema"
_ANY_OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"object"}', strict=False)


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


def without_strict_mode(schema: Any) -> Any:
    """Return a schema for the library's strict mode with the meaning that `schema` has without it.

    Objects and arrays of each level that do not forbid further properties and items allow them.
    """
    if isinstance(schema, list):
        return [without_strict_mode(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, child in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(child, dict):
            found[keyword] = {name: without_strict_mode(value) for name, value in child.items()}
        else:
            found[keyword] = child if keyword in _DATA else without_strict_mode(child)
    kinds = found.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds or "properties" in found:
        found.setdefault("unevaluatedProperties", True)
    if "array" in kinds or "prefixItems" in found:
        found.setdefault("unevaluatedItems", True)
    return found


def _leads_somewhere(schema: Any, target: str) -> bool:
    """Return whether the JSON pointer after "#" leads to a value in `schema`."""
    for escaped in target.split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            # Python refuses to convert thousands of digits.
            index = int(name) if name.isdecimal() and len(name) <= _MAX_INDEX_DIGITS else len(schema)
            if index >= len(schema):
                return False
            schema = schema[index]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return False
    return True


def grammar_of(fields: SamplingFields, prefix: str = "") -> GrammarSpec | None:
    """Return the one of `json_schema`, `regex`, `ebnf` and `structural_tag` that is set.

    `prefix`: path of the object that holds the fields, with a dot.
    """
    given = {kind: value for kind in GrammarKind if (value := getattr(fields, kind)) is not None}
    if not given:
        return None
    if len(given) > 1:
        problem = f"{' and '.join(given)} exclude each other: send one of them"
        raise InvalidRequestError(problem, param=prefix + [*given][1])
    [(kind, value)] = given.items()
    if kind in _JSON_KINDS:
        return json_grammar(kind, value, prefix + kind)
    if not value:
        problem = f"{kind} is empty: leave it out, or say what the output must look like"
        raise InvalidRequestError(problem, param=prefix + kind)
    return GrammarSpec(kind, value, True)


def openai_grammar(body: OpenAIBody) -> GrammarSpec | None:
    """Return `response_format`, or one of the extensions that `grammar_of` supports."""
    grammar = grammar_of(body)
    if body.response_format is None:
        return grammar
    formatted = _response_format(body.response_format)
    if grammar is not None and formatted is not None:
        raise InvalidRequestError(
            f"response_format and {grammar.kind} exclude each other: send one of them", param="response_format"
        )
    return formatted or grammar


def grammar_path(body: OpenAIBody) -> str:
    """Return the path of the field that `openai_grammar` uses, or else of the tools."""
    form = (body.response_format or {}).get("type", "text")
    if form != "text":
        return _SCHEMA_PATH if form == "json_schema" else "response_format"
    return next((kind.value for kind in GrammarKind if getattr(body, kind) is not None), "tools")


def json_grammar(kind: GrammarKind, value: object, param: str, *, strict: bool = True) -> GrammarSpec:
    """Return a grammar that is given in JSON, as text or as an object."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} is a JSON {json_type(value)}: send an object", param=param)
    if not _is_within(value, MAX_GRAMMAR_DEPTH):
        raise InvalidRequestError(f"{param} is nested deeper than {MAX_GRAMMAR_DEPTH} levels: flatten it", param=param)
    if kind is GrammarKind.JSON_SCHEMA:
        check_references(value, param)
    else:
        check_tag_references(value, param)
    return GrammarSpec(kind, msgspec.json.encode(value).decode(), strict)


def _response_format(form: dict[str, Any]) -> GrammarSpec | None:
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            given = form.get("json_schema")
            if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
                raise InvalidRequestError(
                    'response_format of type json_schema needs {"json_schema": {"name": ..., "schema": {...}}}',
                    param="response_format.json_schema",
                )
            # Absent means strict too, because small models ramble wherever the grammar permits it.
            strict = given.get("strict") is not False
            return json_grammar(GrammarKind.JSON_SCHEMA, given["schema"], _SCHEMA_PATH, strict=strict)
        case "structural_tag":
            return json_grammar(GrammarKind.STRUCTURAL_TAG, form, "response_format")
        case other:
            raise InvalidRequestError(
                f"response_format.type is {other!r}: it must be text, json_object, json_schema or structural_tag",
                param="response_format.type",
            )


def _is_within(value: object, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_within(child, depth - 1) for child in children)
