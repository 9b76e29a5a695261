"""Structured output of the real model: 50 schemas, tool calls and their failures, colocated and disaggregated."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from support.deployment import Deployment, deploy

pytestmark = pytest.mark.process

# Every output of one of these is bounded by its schema, and ends well within MAX_TOKENS.
SCHEMAS = json.loads((Path(__file__).parent / "json_schemas.json").read_text())
MAX_TOKENS = 160
MODES = ("colocated", "disaggregated")


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    # A fifth of the default budget: the ambiguous grammar reaches it after fewer tokens.
    yield from deploy(chunk=512, max_total_tokens=20_000, worker_args=["--grammar-step-budget", "0.05"])


@pytest.fixture(autouse=True)
def nothing_is_kept(deployment) -> Iterator[None]:
    yield
    deployment.check_nothing_is_held()


def client_of(deployment: Deployment, mode: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.url(mode)}/v1", api_key="none", max_retries=0)


async def answer(client: openai.AsyncOpenAI, number: int, *, stream: bool) -> tuple[str, str]:
    """(text, finish reason) for one schema."""
    ask: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Give me one example in JSON."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "seed": number,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "example", "strict": True, "schema": SCHEMAS[number]},
        },
    }
    if not stream:
        [choice] = (await client.chat.completions.create(**ask)).choices
        return choice.message.content or "", choice.finish_reason
    text, finish = "", ""
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        [choice] = chunk.choices
        text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
    return text, finish


async def answers(
    deployment: Deployment, mode: str, numbers: Sequence[int], *, stream: bool
) -> dict[int, tuple[str, str]]:
    url = f"{deployment.url(mode)}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=400) as client:
        found = await asyncio.gather(*(answer(client, n, stream=stream) for n in numbers))
    return dict(zip(numbers, found, strict=True))


# All fifty of a tiny model, in every mode and under pressure: tests/parity/test_grammar.py.
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)], ids=["some", "all"])
async def test_outputs_of_schemas_parse_and_validate_and_are_the_same_in_every_mode(deployment, every):
    assert len(SCHEMAS) == 50
    chosen, some = range(0, 50, every), range(0, 50, 3 * every)
    whole, streamed, some_streamed, some_whole = await asyncio.gather(
        answers(deployment, "colocated", chosen, stream=False),
        answers(deployment, "disaggregated", chosen, stream=True),
        answers(deployment, "colocated", some, stream=True),
        answers(deployment, "disaggregated", some, stream=False),
    )
    for number, (text, finish) in whole.items():
        assert finish == "stop", text
        jsonschema.Draft202012Validator(SCHEMAS[number]).validate(json.loads(text))
    assert streamed == whole
    assert some_streamed == some_whole == {n: whole[n] for n in some}


@pytest.mark.parametrize("mode", MODES)
def test_each_kind_of_grammar_with_samples_logprobs_and_seeds(deployment, mode):
    base = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 60, "n": 2}
    kinds = {
        "regex": r"(yes|no), [0-9]{3}",
        "ebnf": 'root ::= "<" word (", " word){1,2} ">"\nword ::= [a-z] [a-z] [a-z]',
        "json_schema": json.dumps(SCHEMAS[5]),
    }
    for kind, grammar in kinds.items():
        body = {"text": "Once upon a time", "sampling_params": base | {kind: grammar}, "return_logprob": True}
        response = deployment.client.post(f"{deployment.url(mode)}/generate", json=body)
        assert response.status_code == 200, response.text
        items = response.json()
        assert len(items) == 2
        for item in items:
            meta = item["meta_info"]
            assert meta["finish_reason"] == {"type": "stop", "matched": 2}
            assert [entry[1] for entry in meta["output_token_logprobs"]] == item["output_ids"]
            if kind == "json_schema":
                jsonschema.validate(json.loads(item["text"]), SCHEMAS[5])
            else:
                pattern = grammar if kind == "regex" else "<[a-z]{3}(, [a-z]{3}){1,2}>"
                assert re.fullmatch(pattern, item["text"])


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_and_min_tokens_hold_inside_a_grammar(deployment, mode):
    def ask(**params) -> dict[str, Any]:
        given = {"temperature": 0.0, "max_new_tokens": 40, **params}
        body = {"text": "One, two, three,", "sampling_params": given}
        return deployment.client.post(f"{deployment.url(mode)}/generate", json=body).json()

    stopped = ask(regex="(a, b, ){1,9}END", stop=["b"])
    assert stopped["text"] == "a, "
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    assert len(ask(regex="[ab]*", min_new_tokens=20)["output_ids"]) >= 20
    assert ask(regex="ab", min_new_tokens=20)["text"] == "ab"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    },
    {"type": "function", "function": {"name": "add_2", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = TOOLS[0]["function"]["parameters"]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("mode", "choice"), [("colocated", "required"), ("disaggregated", NAMED)])
def test_a_call_that_must_come_comes_whole_and_in_deltas(deployment, mode, choice):
    tools = TOOLS[:1] if choice == "required" else TOOLS
    ask = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "How is the weather in Paris, in celsius?"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0.0,
        "max_tokens": 100,
    }
    with client_of(deployment, mode) as client:
        [choice] = client.chat.completions.create(**ask).choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        chunks = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True)]
    assert not any(c.delta.content for c in chunks)
    deltas = [d for c in chunks for d in c.delta.tool_calls or ()]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "get_weather")
    assert deltas[0].id.startswith("call_")
    assert len(deltas) > 1
    assert all(d.id is None and d.function.name is None for d in deltas[1:])
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_model_that_may_call_answers_in_text_and_goes_on_after_a_result(deployment):
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, sunny"},
    ]
    with client_of(deployment, "disaggregated") as client:
        [choice] = client.chat.completions.create(
            model="smollm2", messages=messages, tools=TOOLS, temperature=0.0, max_tokens=30
        ).choices
    assert choice.message.content or choice.message.tool_calls


BAD = [
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}, "strin"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/nothing"}}}, "nothing"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"anyOf": []}}}, "allows no output"),
    ({"type": "json_schema"}, "schema"),
    ({"type": "yaml"}, "yaml"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_schema_is_a_400_in_openais_shape_and_holds_nothing(deployment, mode, stream):
    for form, named in BAD:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "response_format": form}
        response = deployment.client.post(f"{deployment.url(mode)}/v1/chat/completions", json=body | {"stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert named in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
        assert error["param"].startswith("response_format")


def test_a_grammar_compiles_beside_requests_without_one(deployment):
    """This one takes seconds: meanwhile the worker answers others, and its state shows who waits."""
    slow = {"type": "string", "maxLength": 1500}
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "json_schema": json.dumps(slow)}}

    async def ask() -> list[httpx.Response]:
        url = deployment.url("colocated")
        async with httpx.AsyncClient(timeout=120) as client:
            compiling = asyncio.create_task(client.post(f"{url}/generate", json=body))
            while True:
                state = (await client.get(f"{url}/server_info")).json()["internal_states"][0]
                if state["num_grammar_queue_reqs"]:
                    break
                assert not compiling.done(), "compiled before it was seen to wait"
            plain = await client.post(f"{url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}})
            assert not compiling.done()
            return [plain, await compiling]

    assert [r.status_code for r in asyncio.run(ask())] == [200, 200]


# Each token multiplies the ways in which the output can be read.
AMBIGUOUS = """
root ::= (a | b | a a | b b | root root)
a ::= "a" | "aa" | root "a"
b ::= "b" | "a" | "ab"
"""


# tests/unit/engine/test_grammar_host.py checks the budget itself.
@pytest.mark.parametrize("mode", [pytest.param("colocated", marks=pytest.mark.soak), "disaggregated"])
def test_an_ambiguous_grammar_ends_its_requests_alone_while_streams_go_on(deployment, mode):
    url = deployment.url(mode)
    hostile = {"text": "aab", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "ebnf": AMBIGUOUS}}
    plain = {"text": "One, two,", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}

    async def ask() -> tuple[list[httpx.Response], int]:
        async with httpx.AsyncClient(timeout=280) as client:
            streams = [{"stream": True}, {"stream": False}]
            attack = [asyncio.create_task(client.post(f"{url}/generate", json=hostile | s)) for s in streams]
            num_plain = 0
            while not all(task.done() for task in attack):
                response = await client.post(f"{url}/generate", json=plain)
                assert response.status_code == 200, response.text
                num_plain += 1
            return await asyncio.gather(*attack), num_plain

    answers, num_plain = asyncio.run(ask())
    # Plain requests begin and end during the attack.
    assert num_plain >= 2
    for response in answers[1:]:
        assert response.status_code == 422, response.text
        error = response.json()["error"]
        assert error["code"] == "grammar_over_budget"
        assert "--grammar-step-budget" in error["message"]
    assert "grammar_over_budget" in answers[0].text
