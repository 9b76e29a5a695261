"""Common parts of the answers of completions and chat completions: ids, usage, and the stream of chunks.

A format (`completions`, `chat`) writes one sample; a Reply decides when chunks are sent and what surrounds them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from splitserve.api.schemas import OpenAIBody
from splitserve.api.stream import Frames, event
from splitserve.core.batch import TokenLogprob
from splitserve.server.answer import Delta, SampleAnswer, journal_line
from splitserve.server.generation import Generation


@dataclass(frozen=True, slots=True)
class Reply:
    """Part of an answer that is equal in all its chunks."""

    id: str
    model: str
    include_usage: bool
    continuous_usage: bool
    with_token_ids: bool
    # Samples of one prompt; choice i belongs to prompt i // n.
    n: int
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: OpenAIBody, *, prefix: str, rid: str, model: str) -> Reply:
        options = body.stream_options
        dispatch = body.dispatch
        created = {} if dispatch is None or dispatch.created is None else {"created": dispatch.created}
        return cls(
            id=f"{prefix}-{rid}",
            model=body.model or model,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            with_token_ids=bool(body.return_token_ids),
            n=body.n or 1,
            **created,
        )

    def usage(self, answers: Sequence[SampleAnswer]) -> CompletionUsage:
        """Return the usage. A prompt and its cached tokens count once, whatever n is."""
        first_samples = answers[:: self.n]
        prompt = sum(len(a.prompt_ids) for a in first_samples)
        completion = sum(len(a.output_ids) for a in answers)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(a.num_cached_tokens for a in first_samples)),
        )

    def usage_field(self, answers: Sequence[SampleAnswer]) -> dict[str, Any]:
        """Return the field `usage` of a chunk before the last: absent, null, or the usage so far."""
        if not self.include_usage:
            return {}
        return {"usage": self.usage(answers) if self.continuous_usage else None}


class ReplyFormat(Protocol):
    """Answer format of one of the two APIs. Models are dumped without the fields that were never set."""

    reply: Reply

    def answer(self, answers: Sequence[SampleAnswer]) -> BaseModel: ...

    def chunks(self, answer: SampleAnswer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        """Return the chunks of this delta: none, one, or an opening chunk and one."""
        ...

    def last_chunk(self, usage: CompletionUsage) -> BaseModel:
        """Return the chunk that carries the usage and no choices."""
        ...


async def frames(form: ReplyFormat, generation: Generation) -> Frames:
    for answer in generation.answers:
        if answer.sample.past is not None:
            # Format again what the client already has, without sending it. This restores the state of the format.
            list(form.chunks(answer, Delta(answer.text, answer.output_ids, answer.logprobs, is_first=True), {}))
    async with aclosing(generation.updates()) as updates:
        async for answer, delta in updates:
            usage = form.reply.usage_field(generation.answers)
            frame = b"".join(event(dump(chunk)) for chunk in form.chunks(answer, delta, usage))
            if generation.has_journal:
                frame += journal_line(answer, delta)
            if frame:
                yield frame
    if form.reply.include_usage:
        yield event(dump(form.last_chunk(form.reply.usage(generation.answers))))


def dump(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True, warnings=False).encode()


def has_news(answer: SampleAnswer, delta: Delta, *, wants_tokens: bool) -> bool:
    """Return whether a delta needs a chunk: text, the end, or tokens if the client requested them."""
    return bool(delta.text) or answer.finish is not None or (wants_tokens and bool(delta.token_ids))


def finish_reason(answer: SampleAnswer) -> Any:
    """Return "stop", "length", or "abort" if the abort was ordered. None: the sample is still running."""
    return None if answer.finish is None else str(answer.finish.type)


def with_chosen(token: TokenLogprob) -> list[tuple[int, float]]:
    """Return the alternatives including the chosen token."""
    chosen = (token.token_id, token.logprob)
    return list(token.top) if any(t == token.token_id for t, _ in token.top) else [*token.top, chosen]
