from __future__ import annotations

import json
from typing import Any

import pytest

from support.router_world import answers, serve_pair, streams


def meta(input_logprobs: Any, **extra: Any) -> dict[str, Any]:
    return {"text": "x", "meta_info": {"id": "r", "input_token_logprobs": input_logprobs, **extra}}


ASK = {"text": "a", "return_logprob": True}
PROMPT = [[None, 1, None], [-0.5, 2, None]]


async def test_the_prefills_prompt_logprobs_come_before_the_decodes() -> None:
    prefill = meta(PROMPT, input_top_logprobs=[None, [[-0.1, 9, None]]])
    decode = meta([[-2.0, 3, None]], output_token_logprobs=[[-1.0, 4, None]])
    async with serve_pair(answers(prefill), answers(decode)) as pair:
        _, body, _ = await pair.post("/generate", ASK)
        info = json.loads(body)["meta_info"]
        assert info["input_token_logprobs"] == [*PROMPT, [-2.0, 3, None]]
        assert info["input_top_logprobs"] == [None, [[-0.1, 9, None]]]
        assert info["output_token_logprobs"] == [[-1.0, 4, None]]


async def test_a_batch_is_merged_element_by_element() -> None:
    prefill = [meta([[-1.0, 1, None]]), meta([[-2.0, 2, None]])]
    decode = [meta(None), meta([])]
    async with serve_pair(answers(prefill), answers(decode)) as pair:
        _, body, _ = await pair.post("/generate", {"text": ["a", "b"], "return_logprob": True})
        merged = [item["meta_info"]["input_token_logprobs"] for item in json.loads(body)]
        assert merged == [[[-1.0, 1, None]], [[-2.0, 2, None]]]


async def test_without_return_logprob_the_decodes_bytes_pass_untouched() -> None:
    async with serve_pair(answers(meta(PROMPT)), answers(meta([]))) as pair:
        _, body, _ = await pair.post("/generate", {"text": "a"})
        assert body == json.dumps(meta([])).encode()


@pytest.mark.parametrize("answer", ["no object", [1, 2], {"meta_info": 7, "choices": {"logprobs": None}}, []])
async def test_what_has_no_such_fields_passes(answer: Any) -> None:
    async with serve_pair(answers({"meta_info": [PROMPT], "choices": [[]]}), answers(answer)) as pair:
        status, body, _ = await pair.post("/generate", ASK)
        assert (status, json.loads(body)) == (200, answer)


async def test_every_event_of_a_stream_is_merged_however_it_is_cut() -> None:
    events = [b"data: " + json.dumps(meta(None, step=i)).encode() + b"\n\n" for i in range(3)]
    wire = b"".join(events) + b"data: [DONE]\n\n"
    chunks = [wire[i : i + 37] for i in range(0, len(wire), 37)]
    prefill = b"data: " + json.dumps(meta(PROMPT)).encode() + b"\n\ndata: [DONE]\n\n"
    async with serve_pair(streams(prefill), streams(*chunks)) as pair:
        _, body, _ = await pair.post("/generate", {**ASK, "stream": True})
        *frames, done, end = body.split(b"\n\n")
        infos = [json.loads(frame.removeprefix(b"data: "))["meta_info"] for frame in frames]
        assert [info["step"] for info in infos] == [0, 1, 2]
        assert all(info["input_token_logprobs"] == PROMPT for info in infos)
        assert (done, end) == (b"data: [DONE]", b"")


async def test_a_streamed_batch_is_merged_by_index() -> None:
    def events(*items: dict[str, Any]) -> bytes:
        return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in items) + b"data: [DONE]\n\n"

    prefill = events({"index": 1, **meta([[-2.0, 2, None]])}, {"index": 0, **meta([[-1.0, 1, None]])})
    decode = events({"index": 0, **meta([])}, {"index": 1, **meta([])}, {"index": 0, **meta([])})
    async with serve_pair(streams(prefill), streams(decode)) as pair:
        _, body, _ = await pair.post("/generate", {"text": ["a", "b"], "return_logprob": True, "stream": True})
        items = [json.loads(f.removeprefix(b"data: ")) for f in body.split(b"\n\n")[:3]]
        assert [(i["index"], i["meta_info"]["input_token_logprobs"][0][1]) for i in items] == [(0, 1), (1, 2), (0, 1)]


def echoed(token_logprobs: list[float | None], top: list[Any]) -> dict[str, Any]:
    tokens = ["The", " sky", " is", " blue"][: len(token_logprobs)]
    logprobs = {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top, "text_offset": [0]}
    return {"choices": [{"index": 0, "text": "".join(tokens), "logprobs": logprobs}]}


async def test_an_echoed_completion_gets_the_prompts_logprobs_from_the_prefill() -> None:
    prefill = echoed([None, -1.0, -2.0], [None, {"a": -1.0}, {"b": -2.0}])
    decode = echoed([None, None, -2.0, -3.0], [None, None, {"b": -2.0}, {"c": -3.0}])
    async with serve_pair(answers(prefill), answers(decode)) as pair:
        _, answer, _ = await pair.post("/v1/completions", {"prompt": "The sky", "echo": True, "logprobs": 0})
        logprobs = json.loads(answer)["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["The", " sky", " is", " blue"]
        assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0]
        assert logprobs["top_logprobs"] == [None, {"a": -1.0}, {"b": -2.0}, {"c": -3.0}]


async def test_only_the_echo_of_a_streamed_completion_is_filled_in() -> None:
    def event(item: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(item).encode() + b"\n\n"

    prefill = event(echoed([None, -1.0, -2.0], [])) + b"data: [DONE]\n\n"
    decode = event(echoed([None, None, -2.0], [])) + event(echoed([-3.0], [])) + b"data: [DONE]\n\n"
    async with serve_pair(streams(prefill), streams(decode)) as pair:
        body = {"prompt": "The sky", "echo": True, "logprobs": 0, "stream": True}
        _, answer, _ = await pair.post("/v1/completions", body)
        events = [json.loads(e.removeprefix(b"data: ")) for e in answer.split(b"\n\n")[:2]]
        assert [e["choices"][0]["logprobs"]["token_logprobs"] for e in events] == [[None, -1.0, -2.0], [-3.0]]
