"""Streams of all forms, assembled as a client does it, to compare a disturbed stream with an undisturbed one.

Equal means the same tokens, texts, finish reasons and token counts, with nothing lost or sent twice, and logprobs, top
logprobs and hidden states that agree within a tolerance: 0 if the workers are batch invariant.
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

# Numbers of the same token may differ by the effect of another order of float32 sums.
_TOLERANCE = 1e-3
_OUTPUT = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}
_MANY = 128
# Fields that request many top logprobs.
_TOP_LOGPROBS: dict[str, dict[str, Any]] = {
    "/generate": {"return_logprob": True, "top_logprobs_num": _MANY},
    "/v1/completions": {"logprobs": _MANY},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": _MANY},
}


@dataclass
class Choice:
    """One choice of a stream, assembled."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Of each token: alternative, by id or text -> its logprob.
    top_logprobs: list[dict[Any, float]] = field(default_factory=list)
    # Of each token: the state that it was sampled from.
    hidden_states: list[list[float]] = field(default_factory=list)
    finish: Any = None

    def add_logprobs(self, found: dict[str, Any]) -> None:
        """Add the logprobs of new tokens, as /v1/completions or /v1/chat/completions has them."""
        self.logprobs += found.get("token_logprobs", [])
        self.top_logprobs += found.get("top_logprobs") or []
        for entry in found.get("content", []):
            self.logprobs.append(entry["logprob"])
            self.top_logprobs.append({top["token"]: top["logprob"] for top in entry["top_logprobs"]})


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
            # A native event has everything so far, but only new hidden states.
            choice = self.choices[data.get("index", 0)]
            if data["output_ids"][: len(choice.token_ids)] != choice.token_ids:
                raise ValueError(f"{choice.token_ids} became {data['output_ids']}")
            choice.text, choice.token_ids, choice.finish = data["text"], data["output_ids"], meta["finish_reason"]
            choice.logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
            tops = meta.get("output_top_logprobs", [])
            choice.top_logprobs = [{token_id: logprob for logprob, token_id, _ in top} for top in tops]
            choice.hidden_states += meta.get("hidden_states", [])
            if "completion_tokens" in meta:
                self.usage = (meta["prompt_tokens"], meta["completion_tokens"])
        else:
            # An event of the OpenAI API has the new tokens only.
            if usage := data.get("usage"):
                self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
            for part in data["choices"]:
                choice = self.choices[part["index"]]
                choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
                choice.token_ids += part.get("token_ids", [])
                choice.add_logprobs(part.get("logprobs") or {})
                choice.hidden_states += part.get("hidden_states", [])
                choice.finish = part["finish_reason"]

    def difference(self, expected: StreamOutcome, tolerance: float = _TOLERANCE) -> str:
        """Return the first difference from the expected outcome, in words. Empty: none.

        `tolerance`: largest difference of logprobs, and of hidden states, relative to their largest number above 1.
        """
        if self.error is not None:
            return f"error: {self.error.get('message')}"
        if not self.is_done:
            return "the stream has no end"
        if self.usage != expected.usage:
            return f"usage {self.usage} instead of {expected.usage}"
        for index in sorted(self.choices.keys() | expected.choices.keys()):
            found, other = (outcome.choices.get(index, Choice()) for outcome in (self, expected))
            if problem := _difference(found, other, tolerance):
                return f"choice {index}: {problem}"
        return ""


def _difference(found: Choice, expected: Choice, tolerance: float) -> str:
    for name in ("token_ids", "text", "finish"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            return f"{name} {ours!r} instead of {theirs!r}"
    for name in ("logprobs", "top_logprobs", "hidden_states"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if len(ours) != len(theirs):
            return f"{len(ours)} {name} instead of {len(theirs)}"
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            mine, other = map(_numbers, pair)
            # The rounding of a state is proportional to its largest number.
            scale = max(1.0, *map(abs, other.values())) if name == "hidden_states" else 1.0
            if not _agree(mine, other, tolerance * scale):
                changed = [k for k in mine | other if mine.get(k) != other.get(k)]
                examples = [f"{k}: {mine.get(k)} instead of {other.get(k)}" for k in changed[:3]]
                return f"{len(changed)} numbers of {name}[{i}] differ, {', '.join(examples)}"
    return ""


def _numbers(value: Any) -> dict[Any, float]:
    """Return the numbers of one token: its logprob, its top logprobs, or its hidden state."""
    if isinstance(value, dict):
        return value
    return dict(enumerate(value if isinstance(value, list) else [value]))


def _agree(ours: dict[Any, float], theirs: dict[Any, float], tolerance: float) -> bool:
    """Return whether all numbers agree. With a tolerance, alternatives with equal logprobs may change their places."""

    def is_close(a: float, b: float) -> bool:
        return math.isclose(a, b, abs_tol=tolerance)

    if tolerance == 0.0 or len(ours) != len(theirs):
        return ours == theirs
    ranked = zip(sorted(ours.values()), sorted(theirs.values()), strict=True)
    return all(is_close(a, b) for a, b in ranked) and all(is_close(ours.get(k, b), b) for k, b in theirs.items())


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
    # Counter of the schedulers -> its sum over all workers, each since its last start.
    counters: Counter[str] = field(default_factory=Counter)
    # Largest accepted difference of numbers.
    tolerance: float = _TOLERANCE

    @property
    def num_requests(self) -> int:
        return self.num_equal + self.num_left + len(self.errors) + len(self.differences)

    def judge(self, name: str, outcome: StreamOutcome, expected: StreamOutcome) -> None:
        """Record one stream that has ended."""
        self.longest_pauses.append(outcome.longest_pause)
        if outcome.error is not None:
            self.errors.append(f"{name}: {outcome.error.get('message')}")
        elif difference := outcome.difference(expected, self.tolerance):
            self.differences.append(f"{name}: {difference}")
        else:
            self.num_equal += 1


@dataclass(frozen=True, slots=True)
class StreamRequest:
    path: str
    body: dict[str, Any]


def make_requests(count: int, num_tokens: int, *, wide: bool = False) -> list[StreamRequest]:
    """Return requests of all forms in turn, with outputs of `num_tokens`. Any model accepts them.

    `wide`: request hidden states from some, which workers return with --enable-return-hidden-states, and many top
    logprobs from some.
    """
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
        if wide and i % 5 in (0, 1):
            body |= _TOP_LOGPROBS[path]
        if wide and i % 5 in (1, 2):
            body |= {"return_hidden_states": True}
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
        if outcome.is_done:
            raise ValueError(f"an event after the end: {line!r}")
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
