"""References in JSON schemas: those that do not lead into the schema are rejected with their place."""

from typing import Any

import pytest

from splitserve.api.grammars import grammar_of, openai_grammar
from splitserve.api.schemas import CompletionBody, NativeSampling
from splitserve.core.errors import InvalidRequestError

from .conftest import Worker


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "https://example.com/schema.json"}, "a $ref at # to 'https://example.com/schema.json', outside"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "a $ref at #/properties/a to 'other.json', outside"),
        ({"items": {"anyOf": [{}, {"$ref": "file:///etc/passwd"}]}}, "at #/items/anyOf/1 to 'file:///etc/passwd'"),
        ({"properties": {"enum": {"$ref": "http://a"}}}, "at #/properties/enum to 'http://a'"),
        ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "outside the schema"),
        ({"$ref": ""}, "outside the schema"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "at # to '#/$defs/b', which the schema does not define"),
        ({"$ref": "#/anyOf/1", "anyOf": [{}]}, "does not define"),
        ({"$ref": "#/anyOf/" + "9" * 5_000, "anyOf": [{}]}, "does not define"),
        ({"$ref": 5}, "not a string"),
        ({"items": {"$dynamicRef": "#node"}}, "a $dynamicRef at #/items"),
    ],
)
def test_a_reference_that_does_not_lead_into_the_schema_is_rejected_with_its_place(schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(NativeSampling(json_schema=schema))
    assert caught.value.param == "json_schema"
    assert says in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": {}}},
        {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/0"}]},
        # Not references: the name of a property, and data.
        {"properties": {"$ref": {"type": "string"}}},
        {"enum": [{"$ref": "https://example.com"}]},
        {"const": {"$ref": "https://example.com"}},
    ],
)
def test_a_reference_into_the_schema_passes(schema: Any) -> None:
    assert grammar_of(NativeSampling(json_schema=schema)) is not None


def test_schemas_inside_a_structural_tag_are_checked() -> None:
    content = {"type": "json_schema", "json_schema": {"$ref": "https://example.com"}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    with pytest.raises(InvalidRequestError, match="outside the schema"):
        openai_grammar(CompletionBody(prompt="a", response_format=tag))


async def test_the_parameters_of_a_tool_are_checked(worker: Worker) -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "https://example.com"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    response = await worker.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "#/properties/a" in response.json()["error"]["message"]
