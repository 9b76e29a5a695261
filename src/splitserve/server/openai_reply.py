"""What completions and chat completions have in common in their answers: ids, usage, and the drive through a stream.

A form (`completions`, `chat`) knows how one sample looks; a Reply knows when chunks go out and what surrounds them.
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

from splitserve.core.batch import TokenLogprob
from splitserve.server.answer import Answer, Delta
from splitserve.server.dispatch import journal_line
from splitserve.server.generation import Generation
from splitserve.server.schemas import OpenAIBody
from splitserve.server.stream import Frames, event


@dataclass(frozen=True, slots=True)
class Reply:
    """The part of an answer that is the same in all its chunks."""

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

    def usage(self, answers: Sequence[Answer]) -> CompletionUsage:
        """A prompt counts once, whatever n is; so do the tokens of it that were found in a cache."""
        first_samples = answers[:: self.n]
        prompt = sum(len(a.prompt_ids) for a in first_samples)
        completion = sum(len(a.output_ids) for a in answers)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(a.num_cached_tokens for a in first_samples)),
        )

    def usage_field(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """`usage` of a chunk before the last: absent, null, or what has been used so far."""
        if not self.include_usage:
            return {}
        return {"usage": self.usage(answers) if self.continuous_usage else None}


class Form(Protocol):
    """How one of the two APIs writes its answers. Models are dumped without the fields that were never set."""

    reply: Reply

    def answer(self, answers: Sequence[Answer]) -> BaseModel: ...

    def chunks(self, answer: Answer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        """What to send of this delta: nothing, one chunk, or an opening chunk and one."""
        ...

    def last_chunk(self, usage: CompletionUsage) -> BaseModel:
        """The one that carries the usage and no choices."""
        ...


async def frames(form: Form, generation: Generation) -> Frames:
    for answer in generation.answers:
        if answer.sample.past is not None:
            # What the client has already is formed once more, so that the form knows of it, and not sent.
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


def has_news(answer: Answer, delta: Delta, *, wants_tokens: bool) -> bool:
    """Whether a delta is worth a chunk: text, the end, or tokens for a client that looks at tokens."""
    return bool(delta.text) or answer.finish is not None or (wants_tokens and bool(delta.token_ids))


def finish_reason(answer: Answer) -> Any:
    """ "stop", "length", or "abort" where somebody asked for that; None while the sample goes on."""
    return None if answer.finish is None else str(answer.finish.type)


def with_chosen(token: TokenLogprob) -> list[tuple[int, float]]:
    """The alternatives, the chosen token among them."""
    chosen = (token.token_id, token.logprob)
    return list(token.top) if any(t == token.token_id for t, _ in token.top) else [*token.top, chosen]
