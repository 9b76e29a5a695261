"""Requests of `bench router` and their correct answers. Pure.

Each request has a number at the start of its prompt. Its answer depends on the number alone, so the load generator can
check that an answer is correct and complete.
"""

from __future__ import annotations

import msgspec

# Routes of answers in one piece, and of streams.
WHOLE_ROUTE, STREAM_ROUTE = "/generate", "/v1/completions"
_NUM_DIGITS = 10
# Tail of a prompt of about 128 tokens.
_PROMPT_TAIL = " and so on, word by word, for as long as a short question takes" * 8
_NUM_ANSWER_TOKENS = 16
DONE = b"data: [DONE]\n\n"


class Asked(msgspec.Struct):
    """Fields of a request's body that the workers use."""

    text: str | None = None
    prompt: str | None = None
    stream: bool = False
    max_tokens: int = 0
    bootstrap_room: int | None = None
    dispatch: _Dispatch | None = None

    @property
    def number(self) -> int:
        return int((self.text or self.prompt or "")[:_NUM_DIGITS])

    @property
    def wants_journal(self) -> bool:
        return self.dispatch is not None and self.dispatch.journal


class _Dispatch(msgspec.Struct):
    journal: bool = False


ASKED = msgspec.json.Decoder(Asked)


def whole_body(number: int) -> bytes:
    """Return the body of a request for an answer in one piece."""
    params = {"temperature": 0.0, "max_new_tokens": _NUM_ANSWER_TOKENS}
    return msgspec.json.encode({"text": _prompt(number), "sampling_params": params})


def stream_body(number: int, num_chunks: int) -> bytes:
    body = {"model": "mock", "prompt": _prompt(number), "temperature": 0.0, "max_tokens": num_chunks, "stream": True}
    return msgspec.json.encode(body)


def whole_answer(number: int) -> bytes:
    ids = [(number + i) % 50_000 for i in range(_NUM_ANSWER_TOKENS)]
    meta = {
        "id": f"request-{number}",
        "finish_reason": {"type": "length", "length": _NUM_ANSWER_TOKENS},
        "prompt_tokens": 128,
        "completion_tokens": _NUM_ANSWER_TOKENS,
        "cached_tokens": 0,
        "e2e_latency": 0.125,
    }
    return msgspec.json.encode({"text": f"answer {number}", "output_ids": ids, "meta_info": meta})


def chunk(number: int, index: int, num_chunks: int) -> bytes:
    """Return one event of a stream, for its token `index`."""
    finish = "length" if index == num_chunks - 1 else None
    choice = {"index": 0, "text": f" {number}-{index}", "logprobs": None, "finish_reason": finish}
    event = {"id": f"cmpl-{number}", "object": "text_completion", "created": 1, "model": "mock", "choices": [choice]}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def journal_line(index: int) -> bytes:
    """Return the line after the event of token `index` if the router requested a journal."""
    return b': {"index":0,"token_ids":[%d]}\n\n' % index


def stream_answer(number: int, num_chunks: int) -> bytes:
    """Return a whole stream as the client receives it."""
    return b"".join(chunk(number, i, num_chunks) for i in range(num_chunks)) + DONE


def is_same(got: bytes, expected: bytes) -> bool:
    """Return whether two answers in one piece are equal. A router may re-encode JSON."""
    if got == expected:
        return True
    try:
        return bool(msgspec.json.decode(got) == msgspec.json.decode(expected))
    except msgspec.DecodeError:
        return False


def _prompt(number: int) -> str:
    return f"{number:0{_NUM_DIGITS}d}{_PROMPT_TAIL}"
