"""Path of a request that generates, the same for /generate and the routes of the OpenAI API.

1. The body is read and checked, in a thread if it is large. A function of the route converts it to prompts and a
   reply format; the prompts become samples.
2. A Generation runs the samples over the scheduler.
3. The reply format writes the whole answer, or one frame for each delta of a sample.

A room list with one entry per sample gives every sample its own room. With one entry per prompt, or one for all,
samples share a room and are distinguished by their index: over the n of the prompt, or over the whole request. Both
workers of a pair get the same body, so their indexes agree. `data_parallel_rank` is the prefill's rank; without it the
room determines the rank. A request to a decode worker with `local_prefill` and without a room has no prefill worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.datastructures import Headers

from splitserve.api import validation
from splitserve.api.intake import BODY_MEMORY, RECEIVED_AT
from splitserve.api.responses import Frames, raw_json, stream_response, trace_comment, unless_disconnected, with_trace
from splitserve.api.samples import (
    TIMEOUT_HEADER,
    FanOut,
    Urgency,
    fan_out,
    random_rid,
    random_seed,
    urgency_of,
)
from splitserve.api.schemas import (
    ROLE_HEADER,
    GenerateBody,
    GenerationFields,
    NativeSampling,
    OpenAIBody,
    RequestModel,
    SamplingFields,
)
from splitserve.api.validation import check_fields
from splitserve.core.errors import (
    InvalidRequestError,
    MemoryReleasedError,
    MissingBootstrapError,
    RequestAbortedError,
    SplitserveError,
)
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.messages import GenerateRequest
from splitserve.core.parallel import MAX_DP_SIZE
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.server.fake_transfer import FAKE_ACCEPTED, FAKE_HEADER, check_fake_transfer, fake_bootstraps
from splitserve.server.front_end import FrontEnd, read_object
from splitserve.server.generation import (
    Delta,
    Generation,
    SampleAnswer,
    check_answer_memory,
    formatted,
    journal_line,
)

B = TypeVar("B", bound=GenerationFields)
logger = logging.getLogger(__name__)
# Warnings that were logged: each text once, up to this many texts.
_MAX_LOGGED = 256
_logged: set[str] = set()


class ReplyFormat:
    """Format of the answers to one request."""

    # Whether each frame has all logprobs so far.
    repeats_logprobs = False
    # Whether the answers continue the text of their prompts.
    continues_prompt = True
    # Whether the answers list the tokens of their prompts.
    scores_echo = False

    def answer(self, answers: Sequence[SampleAnswer]) -> bytes:
        """Return the JSON of the whole answer."""
        raise NotImplementedError

    def frame(self, answer: SampleAnswer, delta: Delta, answers: Sequence[SampleAnswer]) -> bytes:
        """Return the events of a delta of `answer`, or nothing."""
        raise NotImplementedError

    def end(self, answers: Sequence[SampleAnswer]) -> bytes:
        """Return the events after the last delta, or nothing."""
        return b""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a body, and the format of their answers."""

    # Requests without ids and without the fields of single samples.
    specs: list[GenerateRequest]
    # Samples of each prompt. None: one.
    n: int | None
    reply: ReplyFormat
    # Path of the grammar's field in the body, for errors.
    grammar_path: str


# Function of a route: converts a body with this request id, or these ids. Raises SplitserveError.
ReadPrompts = Callable[[FrontEnd, B, str | list[str]], Prompts]


async def serve(front: FrontEnd, request: Request, model: type[B], read_prompts: ReadPrompts[B]) -> Response:
    try:
        return await _serve(front, request, model, read_prompts)
    except SplitserveError as error:
        if error.reason != RequestAbortedError.reason:
            front.metrics.count_rejection(error.reason)
        raise


async def _serve(front: FrontEnd, request: Request, model: type[B], read_prompts: ReadPrompts[B]) -> Response:
    received_at = front.clock.now()
    work = partial(_prepare, front, request.headers, model, read_prompts)
    is_stream, prompts, fanout, warning = await read_object(front, request, work)
    reply, intake = prompts.reply, [getattr(request.state, key, None) for key in (RECEIVED_AT, BODY_MEMORY)]
    generation = Generation(front, fanout, received_at, *intake, continues_prompt=reply.continues_prompt)
    try:
        if is_stream:
            frames = _frames(reply, generation)
            response = await stream_response(request, frames, has_journal=generation.has_journal)
        else:
            with generation.memory:
                answers = await unless_disconnected(request, generation.complete())
                num_bytes = generation.num_bytes + (generation.prompt_bytes if reply.scores_echo else 0)
                body = await formatted(num_bytes, partial(reply.answer, answers))
            response = raw_json(with_trace(body, generation.trace(is_stream=False)))
    except SplitserveError as error:
        # The scheduler has only the kind of the grammar.
        error.param = prompts.grammar_path if error.param in tuple(GrammarKind) else error.param
        raise
    if warning:
        response.headers[validation.WARNING_HEADER] = warning
    if any(answer.sample.is_fake for answer in generation.answers):
        response.headers[FAKE_HEADER] = FAKE_ACCEPTED
    return response


def _prepare(
    front: FrontEnd, headers: Headers, model: type[B], read_prompts: ReadPrompts[B], found: dict[str, Any]
) -> tuple[bool, Prompts, FanOut, str]:
    """Return whether to stream, the prompts, the samples, and a warning. Raises SplitserveError."""
    own_rid = random_rid()
    with validation.stage(found.get("rid") or own_rid, "validation"):
        check_fields(found, front.config.server.limits)
        body = validation.parse(model, found)
        rid = body.rid or own_rid
        warning = _check_unknown(front, found, model)
        front.check_role(headers.get(ROLE_HEADER))
        if front.memory is not None and front.memory.released:
            raise MemoryReleasedError(front.requests.why_draining)
        prompts = read_prompts(front, body, rid)
        check_fake_transfer(front, body, headers, prompts.specs)
        urgency = urgency_of(body, headers.get(TIMEOUT_HEADER))
        return bool(body.stream), prompts, samples_of(front, body, rid, prompts, urgency), warning


def _check_unknown(front: FrontEnd, found: dict[str, Any], model: type[RequestModel]) -> str:
    """Return a warning about unknown fields of a body, empty if there are none.

    Raises InvalidRequestError if the worker is configured to reject such fields.
    """
    unknown = validation.unknown_fields(found, model.model_fields)
    parts = found.get("sampling_params") if model is GenerateBody else None
    for part in parts if isinstance(parts, list) else [parts]:
        if isinstance(part, dict):
            unknown += validation.unknown_fields(part, NativeSampling.model_fields, "sampling_params.")
    unknown = list(dict.fromkeys(unknown))[: validation.MAX_NAMED]
    if not unknown:
        return ""
    text = validation.warning(unknown)
    if front.config.server.strict_fields:
        raise InvalidRequestError(f"{text} (--strict-fields): correct or remove", param=unknown[0].split(" ")[0])
    if text not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(text)
        logger.warning("request has %s (logged once)", text)
    return f"{text} ignored"


def samples_of(
    front: FrontEnd, body: GenerationFields, rid: str | list[str], prompts: Prompts, urgency: Urgency | None = None
) -> FanOut:
    """Return the samples to generate. Raises InvalidRequestError."""
    num_prompts, n = len(prompts.specs), 1 if prompts.n is None else prompts.n
    limits = front.config.server.limits
    if not 1 <= n <= limits.max_n:
        param = "n" if isinstance(body, OpenAIBody) else "sampling_params.n"
        raise InvalidRequestError(f"n is {n}: it must be in [1, {limits.max_n}] (--max-n)", param=param)
    if num_prompts * n > limits.max_samples:
        problem = f"{num_prompts} prompts with n = {n} are {num_prompts * n} samples"
        raise InvalidRequestError(f"{problem}: send {limits.max_samples} at most (--max-samples)")
    if isinstance(rid, list):
        validation.per_prompt(rid, num_prompts, "rid")
    bootstraps = fake_bootstraps(front, body, num_prompts * n) or bootstrap_infos(
        body,
        mode=front.mode,
        num_prompts=num_prompts,
        n=n,
        own_host=front.config.disaggregation.host,
        own_port=front.bootstrap_port,
        own_dp_size=front.config.dp_size,
    )
    specs = prompts.specs
    scored = (spec for spec in specs if spec.logprob_start is not None)
    num_logprobs = sum((len(s.prompt_ids) - (s.logprob_start or 0)) * (1 + s.num_top_logprobs) for s in scored)
    check_answer_memory(n * num_logprobs, front.request_memory)
    if front.mode is DisaggregationMode.DECODE and bootstraps[0] is not None:
        # The prefill worker computes the prompt, and only it can score it.
        specs = [msgspec.structs.replace(spec, logprob_start=None) for spec in specs]
    dispatch = body.dispatch
    if dispatch is not None:
        # A router has one request of an id at a time, but an earlier one may not have ended here yet, or even begun.
        dispatch = msgspec.structs.replace(dispatch, attempt=next(front.requests.attempt_numbers))
    return fan_out(specs, n, rid, bootstraps, urgency, dispatch, front.info.vocab_size, front.info.model)


async def _frames(reply: ReplyFormat, generation: Generation) -> Frames:
    answers = generation.answers
    with generation.memory:
        generation.count_past()
        for answer in answers:
            if answer.sample.past is not None:
                # Format again what the client already has, without sending it. This restores the state of the format.
                past = Delta(answer.text, answer.output_ids, answer.logprobs, is_first=True)
                await formatted(generation.num_bytes, partial(reply.frame, answer, past, answers))
        async with aclosing(generation.updates()) as updates:
            async for answer, delta in updates:
                num_bytes = generation.num_bytes if reply.repeats_logprobs else generation.num_new_bytes
                num_bytes += generation.prompt_bytes if reply.scores_echo and delta.is_first else 0
                frame = await formatted(num_bytes, partial(reply.frame, answer, delta, answers))
                if generation.has_journal:
                    frame += journal_line(answer, delta, generation.model)
                if frame:
                    generation.mark_formatted(answer)
                    yield frame
    if last := reply.end(answers):
        yield last
    if (trace := generation.trace(is_stream=True)) is not None:
        yield trace_comment(trace)


def prompt_spec(
    front: FrontEnd,
    token_ids: list[int],
    fields: SamplingFields,
    grammar: GrammarSpec | None,
    *,
    name: str,
    num_logprobs: int | None,
    top_name: str,
    logprob_start: int = -1,
    hidden_states: bool | None = None,
    prefix: str = "",
) -> GenerateRequest:
    """Return the request for a prompt, without an id and without the fields of single samples.

    `num_logprobs`: alternatives per token. None: no logprobs. `logprob_start`: first prompt position to score. -1:
    none. `hidden_states`: whether to return them. `name`, `top_name`: names of the prompt and of the number of
    alternatives in errors. `prefix`: path of the object with the sampling fields, with a dot.
    """
    info = front.info
    limit = info.max_total_tokens_per_request
    validation.check_prompt(token_ids, name=name, vocab_size=info.vocab_size, limit=limit)
    limits = front.config.server.limits
    validation.check_logprobs(num_logprobs or 0, top_name, logprob_start, len(token_ids), limits)
    room = limit - len(token_ids)
    return GenerateRequest(
        rid="",
        prompt_ids=token_ids,
        params=validation.sampling_params(
            fields,
            default_seed=random_seed(),
            grammar=grammar,
            room=room,
            vocab_size=info.vocab_size,
            prefix=prefix,
        ),
        return_logprob=num_logprobs is not None,
        num_top_logprobs=num_logprobs or 0,
        return_hidden_states=validation.check_hidden_states(hidden_states, front.config),
        logprob_start=None if logprob_start == -1 else logprob_start,
    )


def bootstrap_infos(
    fields: GenerationFields,
    *,
    mode: DisaggregationMode,
    num_prompts: int,
    n: int,
    own_host: str,
    own_port: int,
    own_dp_size: int = 1,
) -> list[BootstrapInfo | None]:
    """Return one BootstrapInfo per sample, prompt by prompt. None: the sample has no peer.

    Raises MissingBootstrapError if a worker of a pair gets no room.
    """
    num_samples = num_prompts * n
    if mode is DisaggregationMode.NULL:
        return [None] * num_samples
    if mode is DisaggregationMode.DECODE and fields.bootstrap_room is None and fields.local_prefill:
        return [None] * num_samples
    if fields.bootstrap_room is None:
        remedy = ", or set local_prefill" if mode is DisaggregationMode.DECODE else ""
        raise MissingBootstrapError(
            f"this is a {mode} worker and the request names no bootstrap_room: send it to the router, which pairs "
            f"it{remedy}",
            param="bootstrap_room",
        )
    keys = _room_keys(fields.bootstrap_room, num_prompts, n)
    # The prefill worker itself is the rendezvous.
    default_host = own_host if mode is DisaggregationMode.PREFILL else None
    hosts = [_host(h, default_host) for h in _per_sample(fields.bootstrap_host, num_prompts, n, "bootstrap_host")]
    given_ports = _per_sample(fields.bootstrap_port, num_prompts, n, "bootstrap_port")
    ports = [
        validation.check_integer(p, "bootstrap_port", range(1, 1 << 16), "in [1, 65535] or null") or own_port
        for p in given_ports
    ]
    # Only prefill knows its number of ranks.
    dp_size = own_dp_size if mode is DisaggregationMode.PREFILL else MAX_DP_SIZE
    rule = f"in [0, {dp_size}) or null, which leaves it to the room"
    given_ranks = _per_sample(fields.data_parallel_rank, num_prompts, n, "data_parallel_rank")
    ranks = [validation.check_integer(rank, "data_parallel_rank", range(dp_size), rule) for rank in given_ranks]
    return [BootstrapInfo(*info) for info in zip(hosts, ports, keys, ranks, strict=True)]


def _room_keys(rooms: Any, num_prompts: int, n: int) -> list[RoomKey]:
    samples = range(num_prompts * n)
    if not isinstance(rooms, list):
        return [RoomKey(_room(rooms), i) for i in samples]
    spread = _per_sample(rooms, num_prompts, n, "bootstrap_room")
    shared = len(rooms) < len(samples)
    return [RoomKey(_room(spread[i]), i % n if shared else 0) for i in samples]


def _per_sample(value: Any, num_prompts: int, n: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * (num_prompts * n)
    if len(value) == num_prompts * n:
        return value
    if len(value) == num_prompts:
        return [v for v in value for _ in range(n)]
    raise InvalidRequestError(
        f"{name} is a list of {len(value)}: give one, one a prompt ({num_prompts}) or one a sample ({num_prompts * n})",
        param=name,
    )


def _room(room: Any) -> int:
    if room is None:
        raise MissingBootstrapError("bootstrap_room holds null: every sample needs a room", param="bootstrap_room")
    validation.check_rooms([room])
    return int(room)


def _host(host: Any, default: str | None) -> str:
    host = default if host is None else host
    if host is None:
        raise MissingBootstrapError(
            "a decode worker must be told the prefill's bootstrap_host: send the request to the router",
            param="bootstrap_host",
        )
    if not isinstance(host, str) or not host:
        raise InvalidRequestError(f"bootstrap_host {host!r}: must be a host name or address", param="bootstrap_host")
    return host
