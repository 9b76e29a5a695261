"""Conversion of a request's output constraints to a GrammarSpec, or an InvalidRequestError that names the field.

This module checks only the outer form: one constraint at a time, valid JSON, size, depth and references. The compiler
checks the grammar itself, before the request is scheduled or paired.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.api.json_body import json_type
from splitserve.api.schema_refs import check_references, check_tag_references
from splitserve.api.schemas import OpenAIBody, SamplingFields
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind, GrammarSpec

# The time of a compiler grows with the square of the depth.
MAX_GRAMMAR_DEPTH = 64

_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
_ANY_OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"object"}', strict=False)


def grammar_of(fields: SamplingFields, max_chars: int) -> GrammarSpec | None:
    """Return the one of `json_schema`, `regex`, `ebnf` and `structural_tag` that is set.

    `max_chars`: characters that it may have (--max-grammar-chars).
    """
    given = {kind: value for kind in GrammarKind if (value := getattr(fields, kind)) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} exclude each other: send one of them", param=[*given][1])
    [(kind, value)] = given.items()
    return json_grammar(kind, value, kind, max_chars) if kind in _JSON_KINDS else _checked(kind, value, kind, max_chars)


def openai_grammar(body: OpenAIBody, max_chars: int) -> GrammarSpec | None:
    """Return `response_format`, or one of the extensions that `grammar_of` supports."""
    grammar = grammar_of(body, max_chars)
    if body.response_format is None:
        return grammar
    formatted = _response_format(body.response_format, max_chars)
    if grammar is not None and formatted is not None:
        raise InvalidRequestError(
            f"response_format and {grammar.kind} exclude each other: send one of them", param="response_format"
        )
    return formatted or grammar


def json_grammar(kind: GrammarKind, value: object, param: str, max_chars: int, *, strict: bool = True) -> GrammarSpec:
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
    text = msgspec.json.encode(value).decode()
    return _checked(kind, text, param, max_chars, strict=strict)


def _response_format(form: dict[str, Any], max_chars: int) -> GrammarSpec | None:
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
            # Absent means strict too, because small models ramble wherever the grammar permits it.
            strict = given.get("strict") is not False
            return json_grammar(GrammarKind.JSON_SCHEMA, given["schema"], "response_format", max_chars, strict=strict)
        case "structural_tag":
            return json_grammar(GrammarKind.STRUCTURAL_TAG, form, "response_format", max_chars)
        case other:
            raise InvalidRequestError(
                f"response_format.type is {other!r}: it must be text, json_object, json_schema or structural_tag",
                param="response_format",
            )


def _checked(kind: GrammarKind, text: str, name: str, max_chars: int, *, strict: bool = True) -> GrammarSpec:
    if not text:
        raise InvalidRequestError(f"{name} is empty: leave it out, or say what the output must look like", param=name)
    if len(text) > max_chars:
        raise InvalidRequestError(f"{name} has {len(text)} characters: send at most {max_chars}", param=name)
    return GrammarSpec(kind, text, strict)


def _is_within(value: object, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_within(child, depth - 1) for child in children)
