"""Path of a request that generates, the same for /generate and the routes of the OpenAI API.

1. The body is read and checked, in a thread if it is large. A function of the route converts it to prompts and a
   reply format; the prompts become samples.
2. A Generation runs the samples over the scheduler.
3. The reply format writes the whole answer, or one frame for each delta of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.datastructures import Headers

from splitserve.api import validation
from splitserve.api.error_response import raw_json
from splitserve.api.json_body import check_fields
from splitserve.api.samples import TIMEOUT_HEADER, FanOut, PromptSpec, Urgency, fan_out, random_rid, urgency_of
from splitserve.api.schemas import ROLE_HEADER, GenerationFields
from splitserve.api.sse import Frames, stream_response, unless_disconnected
from splitserve.server.answer import Delta, SampleAnswer, journal_line
from splitserve.server.front_end import FrontEnd, check_unknown, read_object, with_warning
from splitserve.server.generation import Generation
from splitserve.server.prompts import bootstrap_infos

B = TypeVar("B", bound=GenerationFields)


class ReplyFormat(Protocol):
    """Format of the answers to one request."""

    def answer(self, answers: Sequence[SampleAnswer]) -> bytes:
        """Return the JSON of the whole answer."""
        ...

    def frame(self, answer: SampleAnswer, delta: Delta, answers: Sequence[SampleAnswer]) -> bytes:
        """Return the events of a delta of `answer`, or nothing."""
        ...

    def end(self, answers: Sequence[SampleAnswer]) -> bytes:
        """Return the events after the last delta, or nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a body, the number of samples of each, and the format of their answers."""

    specs: list[PromptSpec]
    n: int
    reply: ReplyFormat


# Function of a route: converts a body with this request id, or these ids. Raises SplitserveError.
ReadPrompts = Callable[[FrontEnd, B, str | list[str]], Prompts]


async def serve(front: FrontEnd, request: Request, model: type[B], read_prompts: ReadPrompts[B]) -> Response:
    received_at = front.clock.now()
    work = partial(_prepare, front, request.headers, model, read_prompts)
    is_stream, reply, fanout, warning = await read_object(front, request, work)
    generation = Generation(front, fanout, received_at)
    if is_stream:
        frames = _frames(reply, generation)
        response = await stream_response(request, frames, has_journal=generation.has_journal)
    else:
        response = raw_json(reply.answer(await unless_disconnected(request, generation.complete())))
    return with_warning(response, warning)


def _prepare(
    front: FrontEnd, headers: Headers, model: type[B], read_prompts: ReadPrompts[B], found: dict[str, Any]
) -> tuple[bool, ReplyFormat, FanOut, str]:
    """Return whether to stream, the reply format, the samples, and a warning. Raises SplitserveError."""
    check_fields(found, front.config.server.limits)
    body = validation.parse(model, found)
    rid = body.rid or random_rid()
    with validation.stage(rid if isinstance(rid, str) else ",".join(rid), "validation"):
        warning = check_unknown(front, found, model)
        front.check_role(headers.get(ROLE_HEADER))
        prompts = read_prompts(front, body, rid)
        urgency = urgency_of(body, headers.get(TIMEOUT_HEADER))
        return bool(body.stream), prompts.reply, samples_of(front, body, rid, prompts, urgency), warning


def samples_of(
    front: FrontEnd, body: GenerationFields, rid: str | list[str], prompts: Prompts, urgency: Urgency | None = None
) -> FanOut:
    """Return the samples to generate. Raises InvalidRequestError."""
    num_prompts, n = len(prompts.specs), prompts.n
    validation.check_sample_counts(num_prompts, n, front.config.server.limits)
    if isinstance(rid, list):
        validation.per_prompt(rid, num_prompts, "rid")
    bootstraps = bootstrap_infos(
        body,
        mode=front.mode,
        num_prompts=num_prompts,
        n=n,
        own_host=front.config.disaggregation.host,
        own_port=front.bootstrap_port,
        own_dp_size=front.config.dp_size,
    )
    return fan_out(prompts.specs, n, rid, bootstraps, urgency, body.dispatch, front.info.vocab_size)


async def _frames(reply: ReplyFormat, generation: Generation) -> Frames:
    answers = generation.answers
    for answer in answers:
        if answer.sample.past is not None:
            # Format again what the client already has, without sending it. This restores the state of the format.
            reply.frame(answer, Delta(answer.text, answer.output_ids, answer.logprobs, is_first=True), answers)
    async with aclosing(generation.updates()) as updates:
        async for answer, delta in updates:
            frame = reply.frame(answer, delta, answers)
            if generation.has_journal:
                frame += journal_line(answer, delta)
            if frame:
                yield frame
    if last := reply.end(answers):
        yield last
