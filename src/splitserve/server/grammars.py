"""Conversion of a request's output constraints to a GrammarSpec, or an InvalidRequestError that names the field.

This module checks only the outer form: one constraint at a time, valid JSON, size, depth and references. The compiler
checks the grammar itself, before the request is scheduled or paired.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.errors import InvalidRequestError
from splitserve.server.schema_refs import check_references, check_tag_references
from splitserve.server.schemas import OpenAIBody, SamplingFields

# Bounds on what a compiler has to chew on: its time grows with the square of the depth.
MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_GRAMMAR_DEPTH = 64

_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
_ANY_OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"object"}', strict=False)


def grammar_of(fields: SamplingFields) -> GrammarSpec | None:
    """The one of `json_schema`, `regex`, `ebnf` and `structural_tag` that is set."""
    given = {kind: value for kind in GrammarKind if (value := getattr(fields, kind)) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} exclude each other: send one of them", param=[*given][1])
    [(kind, value)] = given.items()
    return json_grammar(kind, value, kind) if kind in _JSON_KINDS else _checked(kind, value)


def openai_grammar(body: OpenAIBody) -> GrammarSpec | None:
    """`response_format`, or one of the extensions that `grammar_of` knows."""
    grammar = grammar_of(body)
    if body.response_format is None:
        return grammar
    formatted = _response_format(body.response_format)
    if grammar is not None and formatted is not None:
        raise InvalidRequestError(
            f"response_format and {grammar.kind} exclude each other: send one of them", param="response_format"
        )
    return formatted or grammar


def json_grammar(kind: GrammarKind, value: object, param: str, *, strict: bool = True) -> GrammarSpec:
    """A grammar that is written in JSON: as text, or as the object itself."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} is a JSON {type(value).__name__}: send an object", param=param)
    if not _is_within(value, MAX_GRAMMAR_DEPTH):
        raise InvalidRequestError(f"{param} is nested deeper than {MAX_GRAMMAR_DEPTH} levels: flatten it", param=param)
    if kind is GrammarKind.JSON_SCHEMA:
        check_references(value, param)
    else:
        check_tag_references(value, param)
    text = msgspec.json.encode(value).decode()
    return _checked(kind, text, param, strict=strict)


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
                    param="response_format",
                )
            # Absent means strict, too: whatever is allowed is what small models ramble into.
            strict = given.get("strict") is not False
            return json_grammar(GrammarKind.JSON_SCHEMA, given["schema"], "response_format", strict=strict)
        case "structural_tag":
            return json_grammar(GrammarKind.STRUCTURAL_TAG, form, "response_format")
        case other:
            raise InvalidRequestError(
                f"response_format.type is {other!r}: it must be text, json_object, json_schema or structural_tag",
                param="response_format",
            )


def _checked(kind: GrammarKind, text: str, param: str | None = None, *, strict: bool = True) -> GrammarSpec:
    name = param or kind
    if not text:
        raise InvalidRequestError(f"{name} is empty: leave it out, or say what the output must look like", param=name)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"{name} has {len(text)} characters: make it {MAX_GRAMMAR_CHARACTERS} at most", param=name
        )
    return GrammarSpec(kind, text, strict)


def _is_within(value: object, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_within(child, depth - 1) for child in children)
