"""Log lines about requests. They have no text of the client: each value is one word.

The access log has one line per request with its timeline, written when the request has ended:

    request rid=6f1c route=/generate key=alice status=200 side=- prompt_tokens=12 uncached_tokens=- output_tokens=64
    queued_s=0.0000 router_s=0.0004 ttft_s=0.0512 duration_s=0.9135 tries=1 prefill=http://10.0.0.5:30000 decode=http://10.0.0.6:30000

`-` is a value that does not exist or is unknown. Token counts are those that workers reported in a usage or a journal.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import msgspec

from splitserve.api.schemas import NativeSampling, SamplingFields
from splitserve.api.validation import is_batch
from splitserve.core.errors import UNREADABLE
from splitserve.core.grammar import GrammarKind
from splitserve.observe.trace import TraceSummary
from splitserve.router.client_stream import ClientStream
from splitserve.router.pairing import Body
from splitserve.router.request_trace import RequestTrace, client_start, trace_id_of
from splitserve.router.worker import Worker

logger = logging.getLogger(__name__)

# Bytes. A larger answer is not parsed for its token counts.
_MAX_READ = 1 << 20
_WORD = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)
_MAX_TOKENS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(slots=True)
class LoggedRequest:
    """Record of a client's request for its log line."""

    route: str
    # Name of the API key. None: no key was needed.
    caller: str | None = None
    # Clock time of the arrival.
    arrived: float = field(default_factory=time.monotonic)
    # W3C trace context of the client.
    traceparent: InitVar[str | None] = None
    # The client's own id in a header of the request.
    request_id: str | None = None
    # Header with the time at which the client sent the request.
    request_start: InitVar[str | None] = None
    # Bytes of its body.
    num_bytes: int = 0
    # Request id: the client's, of any type, or a generated one. None until its body was parsed.
    rid: object = None
    # Seconds that it waited for admission, see `admission.py`. None: not admitted yet.
    queued: float | None = None
    # Clock time of the first dispatch; number of attempts; workers of the last attempt.
    dispatched_at: float | None = None
    num_attempts: int = 0
    workers: tuple[Worker, ...] = ()
    # Tokens of its longest prompt that its decode worker had not cached. None: not requested, or unknown.
    num_uncached: int | None = None
    # Set if it failed. For a stream: the status that it would have had before the first byte.
    status: int | None = None
    # Component at fault (prefill, decode, colocated, router or client), and code of the error.
    side: str | None = None
    error: str = ""
    # Whether it waits at the router: before its first attempt, or after a failed one.
    is_at_router: bool = True
    # Whether there was an order to abort all of it. Its workers got the order, too.
    is_aborted: bool = False
    # Whether the client requested a stream, and numbers of new attempts before and after the first byte.
    is_stream: bool = False
    num_retries: int = 0
    num_migrations: int = 0
    trace: RequestTrace = field(init=False)

    def __post_init__(self, traceparent: str | None, request_start: str | None) -> None:
        received_at = time.time() - (time.monotonic() - self.arrived)
        sent_ago, start = client_start(request_start, received_at)
        trace_id = trace_id_of(traceparent)
        self.trace = RequestTrace(self.arrived, trace_id, traceparent, received_at - sent_ago, sent_ago, start)

    def summary(self, client: ClientStream, now: float, *, is_done: bool = True) -> TraceSummary:
        """Return the summary of the request at this time, for lists of requests."""
        counts = count_tokens(client) if is_done else TokenCounts(None, client.count_tokens(), None)
        status, zero = client.status if self.status is None else self.status, self.trace.zero
        return TraceSummary(
            rid=self.name,
            request_id=word_or_none(self.request_id) or "",
            trace_id=self.trace.trace_id,
            route=self.route,
            status=(status or 0) if is_done else 0,
            error=self.error,
            state="done" if is_done else "waiting" if self.is_at_router else "running",
            started_at=self.trace.started_at,
            ttft_ms=None if client.started_at is None else (client.started_at - zero) * 1e3,
            e2e_ms=(now - zero) * 1e3,
            prompt_tokens=counts.prompt,
            output_tokens=counts.output,
            num_cached_tokens=counts.cached,
            retries=self.num_retries,
            migrations=self.num_migrations,
            workers={worker.mode.value: worker.url for worker in self.workers},
            start=self.trace.start,
        )

    @property
    def name(self) -> str:
        """Return the request id as one string. A batch has all its ids, separated by commas."""
        return ",".join(map(str, self.rid)) if isinstance(self.rid, list) else str(self.rid or self.trace.trace_id)

    @property
    def answer_id(self) -> str | None:
        """Return the id for the header of the answer: the client's own, or the name. None: the name is not one word."""
        return word_or_none(self.request_id) or word_or_none(self.name)

    def log(self, summary: TraceSummary, client: ClientStream) -> None:
        """Write the log line."""
        if not logger.isEnabledFor(logging.INFO):
            return
        prompt_tokens, output_tokens = summary.prompt_tokens, summary.output_tokens
        words = [
            f"rid={one_word(self.rid)} route={one_word(self.route)} key={one_word(self.caller)}",
            f"status={_shown(client.status if self.status is None else self.status)} side={self.side or '-'}",
            f"prompt_tokens={_shown(prompt_tokens)} uncached_tokens={_shown(self.num_uncached)}",
            f"output_tokens={_shown(output_tokens)} queued_s={_shown(self.queued)}",
            f"router_s={self._since_arrival(self.dispatched_at)} ttft_s={self._since_arrival(client.started_at)}",
            f"duration_s={self._since_arrival(time.monotonic())} tries={self.num_attempts}",
            *(f"{worker.mode.value}={one_word(worker.url)}" for worker in self.workers),
        ]
        logger.info("request %s", " ".join(words))

    def _since_arrival(self, then: float | None) -> str:
        return _shown(None if then is None else then - self.arrived)


def _shown(value: float | None) -> str:
    """Return a count, or seconds with four digits."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


class TokenCounts(NamedTuple):
    """Tokens of a request over all its samples. None: unknown."""

    prompt: int | None
    output: int | None
    cached: int | None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int | None:
        details = self.prompt_tokens_details
        return self.cached_tokens if details is None else details.cached_tokens


class _Line(msgspec.Struct):
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0


_LINE = msgspec.json.Decoder(_Line)


class _Answer(msgspec.Struct):
    # Token counts: `usage` in answers of OpenAI's routes, `meta_info` in those of /generate.
    usage: _Counts | None = None
    meta_info: _Counts | None = None


_ANSWERS = msgspec.json.Decoder(_Answer | list[_Answer])


def count_tokens(client: ClientStream) -> TokenCounts:
    """Return the numbers of tokens, from the end of the answer or from the journal."""
    answers = _last_event(client.last_chunks) if client.is_event_stream else _answers(b"".join(client.last_chunks))
    counts = [c for c in (answer.usage or answer.meta_info for answer in answers) if c is not None]
    prompt_tokens = sum(c.prompt_tokens for c in counts) if counts else None
    cached = [c.cached for c in counts if c.cached is not None]
    num_cached = sum(cached) if cached else None
    if client.lines and not counts:
        line = _first_line(client.lines[0])
        prompt_tokens, num_cached = line.num_prompt_tokens or None, line.num_cached_tokens
    if client.lines and not (answers and answers[0].usage):
        # An event has the counts of its own sample only, the journal those of all.
        return TokenCounts(prompt_tokens, client.count_tokens(), num_cached)
    return TokenCounts(prompt_tokens, sum(c.completion_tokens for c in counts) if counts else None, num_cached)


def _first_line(line: bytes) -> _Line:
    """Return the counts in the first line of a journal. They are 0 if a worker of another release wrote it."""
    try:
        return _LINE.decode(line)
    except msgspec.MsgspecError:
        return _Line()


def _last_event(chunks: Sequence[bytes]) -> list[_Answer]:
    """Return the last event of a stream that has token counts."""
    for event in reversed(b"".join(chunks).split(b"\n\n")):
        answers = _answers(event[len(b"data:") :]) if event.startswith(b"data:") else []
        if any(answer.usage or answer.meta_info for answer in answers):
            return answers
    return []


def _answers(raw: bytes) -> list[_Answer]:
    if len(raw) > _MAX_READ:
        return []
    try:
        found = _ANSWERS.decode(raw)
    except UNREADABLE:
        return []
    return found if isinstance(found, list) else [found]


def one_word(value: object) -> str:
    """Return a client's value as one word that cannot begin a line or a field of the log. None: `-`."""
    if value is None:
        return "-"
    text = str(value)
    return text if _WORD.fullmatch(text) else msgspec.json.encode(text[:128]).decode().replace(" ", "\\u0020")


def word_or_none(value: object) -> str | None:
    """Return a client's value if it is valid in a header, else None."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def shape_of(path: str, body: Body) -> str:
    """Return `name=value` words. Prompts count in tokens if they are token ids, else in bytes."""
    params = body.get("sampling_params") if path == "/generate" else body
    if isinstance(params, list) and params:
        params = params[0]
    sampling = params if isinstance(params, dict) else {}
    max_tokens = next((n for name in _MAX_TOKENS if type(n := sampling.get(name, body.get(name))) is int), "-")
    known = NativeSampling.model_fields if path == "/generate" else SamplingFields.model_fields
    names = ",".join(sorted(name for name in known if sampling.get(name) is not None))
    words = [
        f"route={path}",
        *_prompt(body),
        f"max_tokens={max_tokens}",
        f"stream={str(body.get('stream') is True).lower()}",
        f"sampling={names or '-'}",
        f"grammar={_grammar(body, sampling)}",
    ]
    return " ".join(words)


def _prompt(body: Body) -> list[str]:
    value = next((found for name in ("text", "prompt", "input_ids") if (found := body.get(name)) is not None), None)
    if value is None:
        messages = body.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        return [f"messages={count}", f"prompt_bytes={len(msgspec.json.encode(messages))}"]
    prompts = value if is_batch(value) else [value]
    num_tokens = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
    num_bytes = sum(len(prompt.encode()) for prompt in prompts if isinstance(prompt, str))
    return [f"prompts={len(prompts)}", f"prompt_tokens={num_tokens}", f"prompt_bytes={num_bytes}"]


def _grammar(body: Body, sampling: dict[str, Any]) -> str:
    for kind in GrammarKind:
        if sampling.get(kind) is not None:
            return str(kind)
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") in _RESPONSE_FORMATS:
        return str(form["type"])
    return "tools" if body.get("tools") else "-"
