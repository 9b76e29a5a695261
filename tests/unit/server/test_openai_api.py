from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from splitserve.api.intake import Reservation
from splitserve.server.openai import CompletionFormat

from .conftest import Worker

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def api(live_worker: Worker) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client over a real socket."""
    base = f"{live_worker.http.base_url}/v1".replace("//v1", "/v1")
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as api:
        yield api


async def post(worker: Worker, path: str, status: int = 200, **body: Any) -> Any:
    response = await worker.http.post(f"/v1/{path}", json=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_chat_is_answered_with_usage(api: openai.AsyncOpenAI, live_worker: Worker) -> None:
    answer = await api.chat.completions.create(model="tiny", messages=HI, max_tokens=6, temperature=0)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    # The echo of "<|im_start|>user\n". Its first token is special.
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "user\n", "length")
    assert answer.usage is not None
    prompt_tokens = len(live_worker.front.tokenizer.encode(PROMPT))
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.total_tokens == prompt_tokens + 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert live_worker.scheduler.received[0].params.temperature == 0


async def test_a_streamed_chat_opens_with_the_role_and_closes_with_the_usage(api: openai.AsyncOpenAI) -> None:
    stream = await api.chat.completions.create(
        model="tiny", messages=HI, max_completion_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in middle) == "user\n"
    assert [c.choices[0].finish_reason for c in middle][-1] == "length"
    assert all(c.usage is None for c in middle)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6
    assert len({c.id for c in chunks}) == 1


async def test_a_chat_runs_to_its_stop_token_by_default(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "user\nHi"
    assert answer.choices[0].finish_reason == "stop"


async def test_a_completion_and_its_stream_have_one_text(api: openai.AsyncOpenAI) -> None:
    whole = await api.completions.create(model="tiny", prompt="a🙂bc", max_tokens=8, stop=["c"])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("a🙂b", "stop")
    stream = await api.completions.create(model="tiny", prompt="a🙂bc", max_tokens=8, stop=["c"], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "a🙂b"


async def test_errors_raise_the_clients_own_exceptions(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0") as bad:
        await api.chat.completions.create(model="tiny", messages=HI, max_tokens=0)
    assert bad.value.code == "invalid_request"
    with pytest.raises(openai.NotFoundError, match="serves 'tiny'") as unknown:
        await api.completions.create(model="gpt-5", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="has 300 tokens, but") as long:
        await api.completions.create(model="tiny", prompt="x" * 300, stream=True)
    assert long.value.code == "prompt_too_long"


async def test_models_lists_the_served_name_and_the_context(api: openai.AsyncOpenAI) -> None:
    (model,) = (await api.models.list()).data
    assert (model.id, model.max_model_len) == ("tiny", 256)  # type: ignore[attr-defined]
    assert (await api.models.retrieve("tiny")).id == "tiny"


@pytest.mark.parametrize("model", ["tiny", "/models/tiny", "smollm2", None])
async def test_the_model_goes_by_its_served_name_its_path_and_its_alias(worker: Worker, model: str | None) -> None:
    await post(worker, "completions", model=model, prompt="a", max_tokens=1)


async def test_a_chat_with_n_gives_n_choices_and_counts_the_prompt_once(worker: Worker) -> None:
    answer = await post(worker, "chat/completions", messages=HI, n=3, max_tokens=2)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(worker.front.tokenizer.encode(PROMPT))
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("prompt", ["abc", [3, 4], ["abc", "de"], [[3, 4], [5]]])
async def test_prompts_come_in_four_forms(worker: Worker, prompt: Any) -> None:
    answer = await post(worker, "completions", prompt=prompt)
    batch = isinstance(prompt[0], list) or (isinstance(prompt, list) and isinstance(prompt[0], str))
    assert len(answer["choices"]) == (2 if batch else 1)
    assert answer["usage"]["completion_tokens"] == 16 * len(answer["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("is_shared", "status"), [(False, 400), (True, 503)])
async def test_logprobs_count_as_memory_of_requests(worker: Worker, stream: bool, is_shared: bool, status: int) -> None:
    memory = worker.front.request_memory
    memory.max_bytes = 30_000 if is_shared else 10_000
    with Reservation(memory) as other:
        other.resize(20_000 if is_shared else 0)
        body = {"prompt": "a" * 50, "max_tokens": 2, "echo": True, "logprobs": 1, "stream": stream}
        error = (await post(worker, "completions", status, **body))["error"]
        assert "for its answer" in error["message"] if is_shared else "logprobs need" in error["message"]
        assert f"(stage: {'generation' if is_shared else 'validation'})" in error["message"]
        assert memory.reserved == (20_000 if is_shared else 0)
    assert (await post(worker, "completions", prompt="a" * 50, max_tokens=2, logprobs=1))["choices"]
    assert memory.reserved == 0


async def test_logprobs_of_output_count_as_they_come(worker: Worker) -> None:
    worker.front.request_memory.max_bytes = 10_000
    error = (await post(worker, "completions", 400, prompt="abc", max_tokens=40, logprobs=5))["error"]
    assert "(stage: generation): its " in error["message"]
    assert error["param"] == "logprobs"
    assert worker.front.request_memory.reserved == 0


async def test_many_logprobs_are_formatted_in_a_thread(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.server.generation._INLINE_BYTES", 600)
    threads = set()
    logprobs = CompletionFormat._logprobs

    def note(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return logprobs(*args)

    monkeypatch.setattr(CompletionFormat, "_logprobs", note)
    answer = await post(worker, "completions", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "a", "b"]
    assert threads.isdisjoint({threading.current_thread()})


async def test_echo_repeats_the_prompt_with_its_logprobs(worker: Worker) -> None:
    answer = await post(worker, "completions", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "abcab"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][3]["a"] == -0.5


async def test_offsets_count_the_characters_of_the_text_and_not_those_of_its_tokens(worker: Worker) -> None:
    body: dict[str, Any] = {"prompt": "<|im_start|>🙂b", "max_tokens": 6, "logprobs": 0}
    answer = await post(worker, "completions", **body)
    assert answer["choices"][0]["text"] == "🙂b"
    # The special token is skipped.
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 0, 0, 0, 1]
    answer = await post(worker, "completions", echo=True, **body)
    assert answer["choices"][0]["text"] == "<|im_start|>🙂b🙂b"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 12, 12, 12, 12, 13, 14, 14, 14, 14, 14, 15]


async def test_a_streamed_echo_adds_up_to_the_same_answer(live_worker: Worker) -> None:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 0}
    whole = (await post(live_worker, "completions", **body))["choices"][0]
    response = await live_worker.http.post("/v1/completions", json=body | {"stream": True})
    chunks = [json.loads(e[6:]) for e in response.text.split("\n\n")[:-2]]
    choices = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in choices) == whole["text"] == "abcab"
    assert [t for c in choices for t in c["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]
    assert [o for c in choices for o in c["logprobs"]["text_offset"]] == whole["logprobs"]["text_offset"]
    assert whole["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_without_output(live_worker: Worker, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": ["abc", "\u20ac"], "echo": True, "logprobs": 1, "return_token_ids": True}
    longer = await post(live_worker, "completions", max_tokens=1, **body)
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await live_worker.http.post("/v1/completions", json={**body, **options, "max_tokens": 0})
        *chunks, last = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
        choices, usage = sorted((chunk["choices"][0] for chunk in chunks), key=lambda c: c["index"]), last["usage"]
    else:
        answer = await post(live_worker, "completions", max_tokens=0, **body)
        choices, usage = answer["choices"], answer["usage"]
    assert [choice["text"] for choice in choices] == body["prompt"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 0, 6)
    for choice, one_more in zip(choices, longer["choices"], strict=True):
        assert choice["token_ids"] == []
        assert choice["logprobs"] == {name: values[:-1] for name, values in one_more["logprobs"].items()}


@pytest.mark.parametrize(("text", "matched"), [("abc", "stop"), ("abc", "token")])
async def test_the_token_after_a_scored_prompt_ends_nothing(worker: Worker, text: str, matched: str) -> None:
    stop = {"stop": text[0]} if matched == "stop" else {"stop_token_ids": [ord(text[0])]}
    answer = await post(worker, "completions", prompt=text, max_tokens=0, echo=True, **stop)
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [(text, "length")]


async def test_chat_logprobs_carry_text_bytes_and_alternatives(worker: Worker) -> None:
    answer = await post(
        worker,
        "chat/completions",
        messages=[{"role": "user", "content": "🙂"}],
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
        skip_special_tokens=False,
    )
    content = answer["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in content[:3]] == ["<|im_start|>", "u", "s"]
    emoji = content[6:8]
    assert bytes(b for t in emoji for b in t["bytes"]) == "🙂".encode()[:2]
    assert len(content[0]["top_logprobs"]) == 2


async def test_token_ids_are_returned_where_asked_for(worker: Worker) -> None:
    answer = await post(worker, "chat/completions", messages=HI, max_tokens=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == worker.front.tokenizer.encode(PROMPT)
    assert answer["choices"][0]["token_ids"] == answer["prompt_token_ids"][:2]
    answer = await post(worker, "completions", prompt=[5, 6], max_tokens=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == [5, 6]
    assert answer["choices"][0]["token_ids"] == [5, 6]


async def test_continuous_usage_stands_in_every_chunk(worker: Worker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    response = await worker.http.post("/v1/completions", json=body)
    chunks = [json.loads(e[6:]) for e in response.text.split("\n\n")[:-2]]
    assert [c["usage"]["completion_tokens"] for c in chunks][-1] == 3
    assert all(c["usage"]["prompt_tokens"] == 3 for c in chunks)


async def test_content_may_be_a_list_of_text_parts(worker: Worker) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    await post(worker, "chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert worker.front.tokenizer.decode(worker.scheduler.received[0].prompt_ids) == "user\nH\ni\nassistant\n"


async def test_a_final_message_can_be_continued(worker: Worker) -> None:
    messages = [*HI, {"role": "assistant", "content": "The"}]
    await post(worker, "chat/completions", messages=messages, max_tokens=1, continue_final_message=True)
    prompt = worker.front.tokenizer.decode(worker.scheduler.received[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe"


async def test_every_sampling_parameter_reaches_the_scheduler(worker: Worker) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 11,
    }
    extra = {"max_tokens": 9, "min_tokens": 2, "logit_bias": {"5": -100}, "stop": "x", "stop_token_ids": [4]}
    await post(worker, "completions", prompt="a", **given, **extra)
    (request,) = worker.scheduler.received
    assert {name: getattr(request.params, name) for name in given} == given
    assert (request.params.max_new_tokens, request.params.min_new_tokens) == (9, 2)
    assert request.params.logit_bias == {5: -100.0}
    assert (request.params.stop, request.params.stop_token_ids) == (("x",), (4,))
