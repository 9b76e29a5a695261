"""Texts of answers if the decoder strips the first space of a text. The scheduler repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitserve.api.tokenizer import ChatTemplate, Tokenizer

from .conftest import Worker
from .server_fakes import stripping_tokenizer

PROMPT, LOGPROBS = "a b", {"logprobs": 1}
CHAT = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "a b"}]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    return Tokenizer(stripping_tokenizer(), chat_template=template)


async def post(worker: Worker, path: str, **body: Any) -> Any:
    response = await worker.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def complete(worker: Worker, **body: Any) -> Any:
    return (await post(worker, "/v1/completions", prompt=PROMPT, max_tokens=3, **body))["choices"][0]


async def test_a_completion_continues_its_prompt_with_a_space(worker: Worker) -> None:
    assert (await complete(worker))["text"] == " a b"
    assert (await complete(worker, echo=True))["text"] == "a b a b"
    native = await post(worker, "/generate", text=PROMPT, sampling_params={"max_new_tokens": 3})
    assert native["text"] == " a b"


async def test_a_stop_string_with_the_first_space_matches(worker: Worker) -> None:
    choice = await complete(worker, stop=" a")
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


async def test_logprobs_have_the_tokens_with_their_spaces_and_offsets_in_the_text(worker: Worker) -> None:
    logprobs = (await complete(worker, **LOGPROBS))["logprobs"]
    assert logprobs["tokens"] == ["<s>", " a", " b"]
    assert logprobs["text_offset"] == [0, 0, 2]
    # The tokenizer puts a special token before the prompt, which is not in the text.
    echoed = await complete(worker, echo=True, **LOGPROBS)
    assert echoed["logprobs"]["text_offset"] == [0, 0, 1, 3, 3, 5]


async def test_a_chat_message_is_a_new_text_unless_it_continues_the_final_one(worker: Worker) -> None:
    new = await post(worker, "/v1/chat/completions", messages=CHAT[1:], max_tokens=2)
    assert new["choices"][0]["message"]["content"] == "a b"
    continued = await post(worker, "/v1/chat/completions", messages=CHAT[1:], max_tokens=2, continue_final_message=True)
    assert continued["choices"][0]["message"]["content"] == " a b"


@pytest.mark.parametrize("num_told", [1, 2, 3])
async def test_a_stream_that_continues_elsewhere_keeps_its_spaces(worker: Worker, num_told: int) -> None:
    told = [{"index": 0, "token_ids": worker.front.tokenizer.encode("a b")[:num_told]}]
    body = {"prompt": PROMPT, "max_tokens": 6, "stream": True, "dispatch": {"told": told, "attempt": 1}}
    response = await worker.http.post("/v1/completions", json=body)
    events = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    assert text == " a b a b"[[0, 2, 4][num_told - 1] :]
