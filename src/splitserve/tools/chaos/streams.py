"""Streams of all forms, assembled as a client does it, to compare a disturbed stream with an undisturbed one.

Equal means the same tokens, texts, finish reasons and token counts, with nothing lost or sent twice, and logprobs that
agree.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from splitserve.tools.client import RequestFailedError, open_session, stream

# Logprobs of the same token may differ by the effect of another order of float32 sums.
_LOGPROB_TOLERANCE = 1e-3
_OUTPUT = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}


@dataclass
class Choice:
    """One choice of a stream, assembled."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Any = None


@dataclass
class StreamOutcome:
    """Outcome of one request at the client."""

    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    # Prompt and output tokens. None: the server did not report them.
    usage: tuple[int, int] | None = None
    # Error object, from an event or from the body of a response with an error status.
    error: dict[str, Any] | None = None
    # Whether the stream ended properly, even after an error.
    is_done: bool = False
    # Longest time between two events, or from sending to the first event, seconds.
    longest_pause: float = 0.0

    def take(self, data: dict[str, Any]) -> None:
        """Add one event. Raises ValueError if it contradicts earlier tokens."""
        if "error" in data:
            self.error = data["error"]
        elif meta := data.get("meta_info"):
            # A native event has everything so far.
            choice = self.choices[data.get("index", 0)]
            if data["output_ids"][: len(choice.token_ids)] != choice.token_ids:
                raise ValueError(f"{choice.token_ids} became {data['output_ids']}")
            choice.text, choice.token_ids, choice.finish = data["text"], data["output_ids"], meta["finish_reason"]
            choice.logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
        else:
            # An event of the OpenAI API has the new tokens only.
            if usage := data.get("usage"):
                self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
            for part in data["choices"]:
                choice = self.choices[part["index"]]
                choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
                choice.token_ids += part.get("token_ids", [])
                choice.logprobs += (part.get("logprobs") or {}).get("token_logprobs", [])
                choice.finish = part["finish_reason"]

    def difference(self, expected: StreamOutcome) -> str:
        """Return the first difference from the expected outcome, in words. Empty: none."""
        if self.error is not None:
            return f"error: {self.error.get('message')}"
        if not self.is_done:
            return "the stream has no end"
        if self.usage != expected.usage:
            return f"usage {self.usage} instead of {expected.usage}"
        for index, choice in expected.choices.items():
            if problem := _difference(self.choices[index], choice):
                return f"choice {index}: {problem}"
        return ""


def _difference(found: Choice, expected: Choice) -> str:
    for name in ("token_ids", "text", "finish"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            return f"{name} {ours!r} instead of {theirs!r}"
    if len(found.logprobs) != len(expected.logprobs):
        return f"{len(found.logprobs)} logprobs instead of {len(expected.logprobs)}"
    for i, (ours, theirs) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        if not math.isclose(ours, theirs, abs_tol=_LOGPROB_TOLERANCE):
            return f"logprob {i} is {ours} instead of {theirs}"
    return ""


@dataclass
class Tally:
    """Counts and times that clients and fault injectors report during a run."""

    num_equal: int = 0
    # Number of clients that disconnected before the end, as some do on purpose.
    num_left: int = 0
    # Messages of failed requests, and differences between answers and those of the undisturbed run.
    errors: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    # Longest pause of every stream that ended, seconds.
    longest_pauses: list[float] = field(default_factory=list)
    # Name of a fault -> how often it happened.
    faults: Counter[str] = field(default_factory=Counter)
    # Seconds from a fault until the router used the worker, or its replacement, again.
    recoveries: list[float] = field(default_factory=list)

    def judge(self, name: str, outcome: StreamOutcome, expected: StreamOutcome) -> None:
        """Record one stream that has ended."""
        self.longest_pauses.append(outcome.longest_pause)
        if outcome.error is not None:
            self.errors.append(f"{name}: {outcome.error.get('message')}")
        elif difference := outcome.difference(expected):
            self.differences.append(f"{name}: {difference}")
        else:
            self.num_equal += 1


@dataclass(frozen=True, slots=True)
class StreamRequest:
    path: str
    body: dict[str, Any]


def make_requests(count: int, num_tokens: int) -> list[StreamRequest]:
    """Return requests of all forms in turn, with outputs of `num_tokens`. Any model accepts them."""
    penalties = {"frequency_penalty": 0.3, "repetition_penalty": 1.1}
    native = {"max_new_tokens": num_tokens, "ignore_eos": True}
    long = {"max_tokens": num_tokens, "min_tokens": num_tokens, "return_token_ids": True}
    requests = []
    for i in range(count):
        prompt = [(i * 37 + j * 11) % 250 for j in range(20 + 7 * i)]
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": i}
        completion = {"prompt": prompt, **sampled, **long}
        forms: list[tuple[str, dict[str, Any]]] = [
            ("/generate", {"input_ids": prompt, "sampling_params": {"temperature": 0.0, **native}}),
            (
                "/generate",
                {"input_ids": prompt, "sampling_params": {**sampled, **penalties, **native}, "return_logprob": True},
            ),
            ("/v1/completions", {**completion, "n": 2, "logprobs": 1}),
            (
                "/v1/completions",
                {"prompt": prompt, "temperature": 0, **long, "stream_options": {"include_usage": True}},
            ),
            ("/v1/completions", {**completion, "json_schema": _OUTPUT, "min_tokens": 0}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": f"say {i}"}], **sampled, **penalties, **long},
            ),
        ]
        path, body = forms[i % len(forms)]
        requests.append(StreamRequest(path, body | {"stream": True}))
    return requests


async def follow(session: aiohttp.ClientSession, url: str, request: StreamRequest, outcome: StreamOutcome) -> None:
    """Fill `outcome` as the stream arrives. Raises RequestFailedError if the connection or a line is broken."""
    last_at = time.monotonic()

    def take(line: bytes) -> None:
        nonlocal last_at
        if line == b"\n":
            return
        if not line.startswith(b"data: "):
            raise ValueError(f"not an event: {line!r}")
        now = time.monotonic()
        outcome.longest_pause = max(outcome.longest_pause, now - last_at)
        last_at = now
        if line.startswith(b"data: [DONE]"):
            outcome.is_done = True
        else:
            outcome.take(json.loads(line[6:]))

    try:
        await stream(session, url + request.path, request.body, take)
    except RequestFailedError as error:
        if error.body is None:
            raise
        outcome.error, outcome.is_done = json.loads(error.body)["error"], True


def follow_undisturbed(url: str, requests: Sequence[StreamRequest], *, timeout: float) -> dict[int, StreamOutcome]:
    """Run all requests at once. Return their outcomes by number, to compare disturbed streams with.

    Raises RequestFailedError if one of them does not end well.
    """
    outcomes = {i: StreamOutcome() for i in range(len(requests))}

    async def run() -> None:
        async with open_session(timeout) as session:
            await asyncio.gather(*(follow(session, url, request, outcomes[i]) for i, request in enumerate(requests)))

    asyncio.run(run())
    if failed := {i: o.error for i, o in outcomes.items() if o.error is not None or not o.is_done}:
        raise RequestFailedError(f"requests failed though nothing disturbed them: {failed}")
    return outcomes
