"""A router with the model's tokenizer computes the same tokens and block hashes of a body's prompt as a worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.api.prompt_tokens import prompts_of
from splitserve.api.schemas import ChatBody, CompletionBody, GenerateBody
from splitserve.api.tokenizer import Tokenizer
from splitserve.cache.kv_events import BlockRecord
from splitserve.cache.prefix import RadixCache
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import InvalidRequestError, PromptTooLongError
from splitserve.observe.events.schema import BlockStored
from splitserve.router.cache_follower import hash_prompts
from splitserve.server.app import build_app
from splitserve.server.front_end import FrontEnd
from splitserve.server.native import read_generate
from splitserve.server.openai import read_chat, read_completion

from .server_fakes import READY, SteppedScheduler

NATIVE, COMPLETION, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
SIZE = 4
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
ids = st.lists(st.integers(0, 255), min_size=1, max_size=20)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=3,
)
chats = st.builds(
    lambda chat, more: {"messages": chat, **more},
    messages,
    st.fixed_dictionaries(
        {},
        optional={
            "add_generation_prompt": st.booleans(),
            "tools": st.just([TOOL]),
            "chat_template_kwargs": st.just({"x": 1}),
        },
    ),
)
bodies = st.one_of(
    st.tuples(st.just(NATIVE), texts.map(lambda t: {"text": t})),
    st.tuples(st.just(NATIVE), ids.map(lambda t: {"input_ids": t})),
    st.tuples(st.just(NATIVE), st.lists(texts, min_size=1, max_size=3).map(lambda t: {"text": t})),
    st.tuples(st.just(NATIVE), st.lists(ids, min_size=1, max_size=3).map(lambda t: {"input_ids": t})),
    st.tuples(st.just(COMPLETION), texts.map(lambda t: {"prompt": t})),
    st.tuples(st.just(COMPLETION), st.lists(texts, min_size=1, max_size=3).map(lambda t: {"prompt": t})),
    st.tuples(st.just(COMPLETION), ids.map(lambda t: {"prompt": t})),
    st.tuples(st.just(CHAT), chats),
)


class RoomyScheduler(SteppedScheduler):
    info = msgspec.structs.replace(READY, max_total_tokens_per_request=10_000)


def front(tokenizer: Tokenizer) -> FrontEnd:
    app = build_app(
        config=WorkerConfig(), scheduler=RoomyScheduler(), tokenizer=tokenizer, model_path="/m", bootstrap_port=None
    )
    found: FrontEnd = app.state.front
    return found


def computed(front: FrontEnd, path: str, body: dict[str, Any]) -> list[int]:
    """What this worker's scheduler would get of the body's first prompt."""
    if path == NATIVE:
        prompts = read_generate(front, GenerateBody.model_validate(body), "r")
    elif path == COMPLETION:
        prompts = read_completion(front, CompletionBody.model_validate(body), "r")
    else:
        prompts = read_chat(front, ChatBody.model_validate(body), "r")
    return prompts.specs[0].prompt_ids


def first_prompt(path: str, body: dict[str, Any], tokenizer: Tokenizer | None) -> list[int] | None:
    prompts = prompts_of(path, body, tokenizer, at_most=1)
    return None if prompts is None else prompts[0]


def told(prompt: list[int]) -> list[int]:
    """Return the blocks that a worker publishes when it has computed this prompt."""
    record = BlockRecord(SIZE)
    whole = len(prompt) // SIZE
    RadixCache(SIZE, record).insert(prompt[: whole * SIZE], list(range(whole)))
    return [name for event in record.take_news() if isinstance(event, BlockStored) for name in event.block_hashes]


@given(bodies)
def test_a_router_reads_the_tokens_and_names_the_blocks_of_a_worker(tokenizer, case) -> None:
    path, body = case
    expected = computed(front(tokenizer), path, body)
    assert first_prompt(path, body, tokenizer) == expected
    blocks = hash_prompts(path, body, tokenizer, {SIZE, 7}, at_most=1)
    assert blocks is not None
    [hashes] = [block.hashes for block in blocks]
    assert hashes[SIZE] == told(expected)
    assert len(hashes[7]) == len(expected) // 7


def test_a_final_message_is_continued_as_a_worker_does(tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello th"}]
    body = {"messages": chat, "continue_final_message": True}
    assert first_prompt(CHAT, body, tokenizer) == computed(front(tokenizer), CHAT, body)


def test_all_prompts_of_a_batch_are_read_one_by_one(tokenizer) -> None:
    texts = ["Hi there", "a"]
    expected = [first_prompt(NATIVE, {"text": text}, tokenizer) for text in texts]
    assert prompts_of(NATIVE, {"text": texts}, tokenizer) == expected
    blocks = hash_prompts(COMPLETION, {"prompt": [[1] * SIZE, [2]]}, None, {SIZE})
    assert blocks is not None
    assert [(b.num_tokens, len(b.hashes[SIZE])) for b in blocks] == [(SIZE, 1), (1, 0)]
    assert hash_prompts(NATIVE, {"text": texts}, None, {SIZE}) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, {"text": "hello " * 20_000}),
        (COMPLETION, {"prompt": "hello " * 20_000}),
        (CHAT, {"messages": [{"role": "user", "content": "hello " * 20_000}]}),
    ],
)
def test_a_prompt_longer_than_any_context_is_not_hashed(path, body, tokenizer) -> None:
    assert hash_prompts(path, body, tokenizer, {SIZE}, 10**6)
    with pytest.raises(PromptTooLongError, match="more than 100 tokens"):
        hash_prompts(path, body, tokenizer, {SIZE}, 100)


def test_without_a_tokenizer_only_ids_are_read() -> None:
    assert first_prompt(NATIVE, {"input_ids": [[1, 2], [3]]}, None) == [1, 2]
    assert first_prompt(COMPLETION, {"prompt": [1, 2]}, None) == [1, 2]
    for path, body in (
        (NATIVE, {"text": "a"}),
        (COMPLETION, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user"}]}),
    ):
        assert first_prompt(path, body, None) is None
        assert hash_prompts(path, body, None, {SIZE}) is None


@pytest.mark.parametrize(
    ("path", "body"), [(NATIVE, {}), (NATIVE, {"text": 5}), (COMPLETION, {"prompt": []}), (CHAT, {"messages": "a"})]
)
def test_a_body_without_a_readable_prompt_is_refused(path, body, tokenizer) -> None:
    with pytest.raises(InvalidRequestError):
        first_prompt(path, body, tokenizer)
