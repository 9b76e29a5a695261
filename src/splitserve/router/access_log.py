"""Access log: one line per request with its timeline, written when the request has ended.

    request rid=6f1c route=/generate key=alice status=200 side=- prompt_tokens=12 uncached_tokens=- output_tokens=64
    queued_s=0.0000 router_s=0.0004 ttft_s=0.0512 duration_s=0.9135 tries=1 prefill=http://10.0.0.5:30000 decode=http://10.0.0.6:30000

`-` is a value that does not exist or is unknown. Token counts are those that workers reported in a usage or a journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from splitserve.router.attempts import RequestAttempts
from splitserve.router.client_stream import ClientStream
from splitserve.router.log_words import one_word

logger = logging.getLogger(__name__)

# Bytes. A larger answer is not parsed for its token counts.
_MAX_READ = 1 << 20


@dataclass(slots=True)
class LoggedRequest:
    """Record of a client's request for its log line."""

    route: str
    # Name of the API key. None: no key was needed.
    caller: str | None = None
    # Clock time of the arrival.
    arrived: float = field(default_factory=time.monotonic)
    # None until its body was parsed.
    attempts: RequestAttempts | None = None
    # Set if it failed. For a stream: the status that it would have had before the first byte.
    status: int | None = None
    # Component at fault: prefill, decode, colocated, router or client.
    side: str | None = None

    def fail(self, side: str, status: int) -> None:
        self.side, self.status = side, status

    def log(self, client: ClientStream) -> None:
        """Write the log line."""
        if not logger.isEnabledFor(logging.INFO):
            return
        attempts = self.attempts
        prompt_tokens, output_tokens = (None, None) if attempts is None else _count_tokens(client)
        words = [
            f"rid={one_word(None if attempts is None else attempts.rid)}",
            f"route={one_word(self.route)} key={one_word(self.caller)}",
            f"status={_number(client.status if self.status is None else self.status)} side={self.side or '-'}",
            f"prompt_tokens={_number(prompt_tokens)}",
            f"uncached_tokens={_number(None if attempts is None else attempts.num_uncached)}",
            f"output_tokens={_number(output_tokens)}",
            f"queued_s={_seconds(None if attempts is None else attempts.queued)}",
            f"router_s={self._since_arrival(None if attempts is None else attempts.dispatched_at)}",
            f"ttft_s={self._since_arrival(client.started_at)}",
            f"duration_s={self._since_arrival(time.monotonic())}",
            f"tries={0 if attempts is None else attempts.num_attempts}",
        ]
        if attempts is not None:
            words += [f"{worker.mode.value}={one_word(worker.url)}" for worker in attempts.workers]
        logger.info("request %s", " ".join(words))

    def _since_arrival(self, then: float | None) -> str:
        return _seconds(None if then is None else then - self.arrived)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


class _Counts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    # Token counts: `usage` in answers of OpenAI's routes, `meta_info` in those of /generate.
    usage: _Counts | None = None
    meta_info: _Counts | None = None


_ANSWERS = msgspec.json.Decoder(_Answer | list[_Answer])


def _count_tokens(client: ClientStream) -> tuple[int | None, int | None]:
    """Return the known numbers of prompt and output tokens. None: unknown."""
    answers = _last_event(client.last_chunks) if client.is_event_stream else _answers(b"".join(client.last_chunks))
    counts = [c for c in (answer.usage or answer.meta_info for answer in answers) if c is not None]
    prompt_tokens = sum(c.prompt_tokens for c in counts) if counts else None
    if client.lines and not (answers and answers[0].usage):
        # An event has the counts of its own sample only, the journal those of all.
        return prompt_tokens, client.count_tokens()
    return prompt_tokens, sum(c.completion_tokens for c in counts) if counts else None


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
    except (msgspec.MsgspecError, RecursionError):
        return []
    return found if isinstance(found, list) else [found]
