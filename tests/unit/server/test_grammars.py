"""Forms in which clients constrain their output: each gives one GrammarSpec, or an error with the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitserve.api.grammars import MAX_GRAMMAR_DEPTH, grammar_of, openai_grammar
from splitserve.api.schemas import CompletionBody, NativeSampling
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.limits import LimitsConfig

from .conftest import StartWorker, Worker

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"null"},"a":{"type":"null"}}}'


def native(**fields: Any) -> GrammarSpec | None:
    return grammar_of(NativeSampling(**fields))


def openai(**fields: Any) -> GrammarSpec | None:
    return openai_grammar(CompletionBody(prompt="a", **fields))


def response_format(schema: object, **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def test_a_schema_is_the_same_grammar_as_text_as_an_object_and_as_a_response_format() -> None:
    expected = GrammarSpec(GrammarKind.JSON_SCHEMA, TEXT)
    assert native(json_schema=json.dumps(SCHEMA, indent=2)) == expected
    assert native(json_schema=SCHEMA) == expected
    assert openai(json_schema=SCHEMA) == expected
    assert openai(response_format=response_format(SCHEMA)) == expected
    assert openai(response_format=response_format(SCHEMA, strict=True)) == expected


def test_only_strict_false_lets_a_schema_be_extended() -> None:
    spec = openai(response_format=response_format(SCHEMA, strict=False))
    assert spec == GrammarSpec(GrammarKind.JSON_SCHEMA, TEXT, strict=False)


def test_text_and_nothing_are_no_grammar_and_json_object_is_any_object() -> None:
    assert native() is openai() is openai(response_format={"type": "text"}) is None
    any_object = openai(response_format={"type": "json_object"})
    assert any_object == GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"object"}', strict=False)


def test_regex_ebnf_and_tags_are_taken_as_they_are() -> None:
    assert native(regex="a+") == GrammarSpec(GrammarKind.REGEX, "a+")
    assert native(ebnf='root ::= "a"') == GrammarSpec(GrammarKind.EBNF, 'root ::= "a"')
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    expected = GrammarSpec(GrammarKind.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}')
    assert native(structural_tag=tag) == openai(response_format=tag) == expected


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf exclude each other"),
        ({"regex": ""}, "regex", "empty"),
        ({"json_schema": "{nope"}, "json_schema", "not valid JSON"),
        ({"json_schema": "[]"}, "json_schema", "a JSON array: send an object"),
        ({"json_schema": nested(MAX_GRAMMAR_DEPTH + 1)}, "json_schema", "deeper than 64"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {}}, "response_format.type", "None"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": response_format("text")}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "exclude each other"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        openai(**fields)
    assert caught.value.param == param
    assert says in caught.value.message


def test_the_deepest_schema_that_is_allowed_passes() -> None:
    assert native(json_schema=nested(MAX_GRAMMAR_DEPTH)) is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"regex": "a+"}}),
        ("/v1/completions", {"prompt": "a", "regex": "a+"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "regex": "a+", "max_tokens": 2}),
    ],
)
async def test_every_route_hands_the_grammar_to_the_scheduler(worker: Worker, path: str, body: dict[str, Any]) -> None:
    response = await worker.http.post(path, json=body)
    assert response.status_code == 200, response.text
    [request] = worker.scheduler.received
    assert request.params.grammar == GrammarSpec(GrammarKind.REGEX, "a+")


@pytest.mark.parametrize("max_chars", [300_000, 100_000])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/generate",
            {"text": "a", "sampling_params": {"json_schema": {"const": "a" * 270_000}}},
            "sampling_params.json_schema",
        ),
        ("/v1/completions", {"prompt": "a", "regex": "a" * 270_000}, "regex"),
        ("/v1/completions", {"prompt": "a", "response_format": response_format({"const": "a" * 270_000})}, None),
    ],
)
async def test_the_option_alone_limits_the_characters_of_a_grammar(
    start_worker: StartWorker, path: str, fields: dict[str, Any], param: str | None, max_chars: int
) -> None:
    limits = LimitsConfig(max_grammar_chars=max_chars)
    async with start_worker(limits=limits) as worker:
        response = await worker.http.post(path, json=fields | {"max_tokens": 2})
    if max_chars > 270_000:
        assert response.status_code == 200, response.text[:500]
    else:
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param or "response_format")
        assert f"send at most {max_chars} (--max-grammar-chars)" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "kind", "param"),
    [
        ("/generate", {"sampling_params": {"ebnf": "root ::= x"}}, "ebnf", "sampling_params.ebnf"),
        ("/generate", {"sampling_params": [{"ebnf": "root ::= x"}]}, "ebnf", "sampling_params"),
        ("/v1/completions", {"ebnf": "root ::= x"}, "ebnf", "ebnf"),
        (
            "/v1/completions",
            {"response_format": response_format({"type": "no"})},
            "json_schema",
            "response_format.json_schema.schema",
        ),
        (
            "/v1/completions",
            {"response_format": {"type": "structural_tag"}},
            "structural_tag",
            "response_format",
        ),
    ],
)
async def test_an_error_the_scheduler_finds_has_the_path_of_its_field(
    worker: Worker, path: str, fields: dict[str, Any], kind: str, param: str, stream: bool
) -> None:
    from splitserve.core.request import FinishReason, FinishType

    worker.scheduler.fail_with = FinishReason(
        FinishType.ABORT, message="no such rule", status_code=400, reason="invalid_request", param=kind
    )
    body = {"text": ["a"], "prompt": "a", "stream": stream} | fields
    response = await worker.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "no such rule",
        "type": "invalid_request_error",
        "param": param,
        "code": "invalid_request",
    }
