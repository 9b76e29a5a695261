"""POST /generate: the native API, in the format of SGLang's clients and routers.

1. The body becomes prompts, one PromptSpec each, and these become a FanOut.
2. Not streamed, the answer is one object, or a list if the client sent a batch or requested n > 1.
3. Streamed, every frame contains all text so far of one sample, with its `index` if there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers

from splitserve.api import validation
from splitserve.api.dispatch import ROLE_HEADER, with_dispatch
from splitserve.api.error_response import json_response
from splitserve.api.fanout import FanOut, PromptSpec, draw_rid, draw_seed, fan_out
from splitserve.api.field_limits import check_fields
from splitserve.api.grammars import grammar_of
from splitserve.api.operations import OPERATIONS
from splitserve.api.patience import with_patience
from splitserve.api.prompt_tokens import tokenize
from splitserve.api.schemas import GenerateBody, NativeSampling
from splitserve.api.stream import Frames, event, stream_response, unless_disconnected
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError
from splitserve.core.messages import SpeculationStats
from splitserve.core.request import FinishReason, FinishType
from splitserve.observe.worker_metrics import gb_per_s
from splitserve.server.answer import SampleAnswer, journal_line
from splitserve.server.front_end import FrontEnd
from splitserve.server.generation import Generation
from splitserve.server.prompts import bootstraps_of, prompt_spec
from splitserve.server.read_body import check_unknown, read_object, with_warning

DEFAULT_MAX_NEW_TOKENS = 128


def native_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()

    @router.post("/generate", **OPERATIONS["/generate"])
    @router.put("/generate", **OPERATIONS["/generate"])
    async def generate(request: Request) -> Response:
        received_at = front.clock.now()
        work = partial(_prepare_request, front, request.headers)
        body, fanout, is_list, warning = await read_object(front, request, work)
        generation = Generation(front, fanout, received_at)
        with_text = bool(body.return_text_in_logprobs)
        if body.stream:
            frames = _frames(front, generation, is_list, with_text)
            response = await stream_response(request, frames, has_journal=generation.has_journal)
        else:
            answers = await unless_disconnected(request, generation.complete())
            items = [answer_object(front, a, with_text) for a in answers]
            response = json_response(items if is_list else items[0])
        return with_warning(response, warning)

    return router


def _prepare_request(
    front: FrontEnd, headers: Headers, found: dict[str, Any]
) -> tuple[GenerateBody, FanOut, bool, str]:
    """Return the body, its samples, whether the answer is a list, and a warning. Raises SplitserveError."""
    check_fields(found, front.config.server.limits)
    body = validation.parse(GenerateBody, found)
    rid = body.rid or draw_rid()
    with validation.stage(rid if isinstance(rid, str) else ",".join(rid), "validation"):
        warning = check_unknown(front, found, GenerateBody, NativeSampling)
        front.check_role(headers.get(ROLE_HEADER))
        fanout, is_list = prepare(front, body, rid)
        fanout = with_patience(fanout, body, headers)
        return body, with_dispatch(fanout, body.dispatch, front.info.vocab_size), is_list, warning


def prepare(front: FrontEnd, body: GenerateBody, rid: str | list[str]) -> tuple[FanOut, bool]:
    """Return the samples to generate, and whether the answer is a list. Raises InvalidRequestError."""
    validation.check_exactly_one(body, "text", "input_ids")
    name, value = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    assert value is not None
    prompts, is_batch = validation.prompt_list(value, name)
    count = len(prompts)
    sampling = [
        validation.parse(NativeSampling, s if s is not None else {})
        for s in validation.per_prompt(body.sampling_params, count, "sampling_params")
    ]
    n = _common_n(sampling)
    validation.check_sample_counts(count, n, front.config.server.limits)
    if isinstance(rid, list):
        validation.per_prompt(rid, count, "rid")
    bootstraps = bootstraps_of(front, body, count, n)
    returns = validation.per_prompt(body.return_logprob, count, "return_logprob")
    starts = validation.per_prompt(body.logprob_start_len, count, "logprob_start_len")
    tops = validation.per_prompt(body.top_logprobs_num, count, "top_logprobs_num")
    specs = [
        _spec(
            front,
            tokenize(front.tokenizer, prompt, front.context_length),
            name,
            sampling[i],
            (bool(returns[i]), starts[i], tops[i]),
        )
        for i, prompt in enumerate(prompts)
    ]
    return fan_out(specs, n, rid, bootstraps), is_batch or n > 1


def _spec(
    front: FrontEnd,
    token_ids: list[int],
    name: str,
    sampling: NativeSampling,
    logprobs: tuple[bool, int | None, int | None],
) -> PromptSpec:
    wants_logprobs, start, top = logprobs
    seed = sampling.seed if sampling.seed is not None else sampling.sampling_seed
    return prompt_spec(
        front,
        token_ids,
        sampling,
        name=name,
        max_new=DEFAULT_MAX_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens,
        min_new=sampling.min_new_tokens,
        seed=draw_seed() if seed is None else seed,
        return_logprob=wants_logprobs,
        num_top_logprobs=(top or 0) if wants_logprobs else 0,
        logprob_start_len=-1 if start is None or not wants_logprobs else start,
        top_name="top_logprobs_num",
        grammar=grammar_of(sampling, front.config.server.limits.max_grammar_chars),
    )


def _common_n(sampling: Sequence[NativeSampling]) -> int:
    counts = {1 if s.n is None else s.n for s in sampling}
    if len(counts) != 1:
        raise InvalidRequestError(f"n differs between the prompts of a batch ({sorted(counts)}): send one n", param="n")
    return counts.pop()


async def _frames(front: FrontEnd, generation: Generation, is_list: bool, with_text: bool) -> Frames:
    async with aclosing(generation.updates()) as updates:
        async for answer, delta in updates:
            frame = answer_object(front, answer, with_text)
            if is_list:
                frame["index"] = answer.sample.index
            line = journal_line(answer, delta) if generation.has_journal else b""
            yield event(msgspec.json.encode(frame)) + line


def answer_object(front: FrontEnd, answer: SampleAnswer, with_text: bool) -> dict[str, Any]:
    """Return the answer of one sample, finished or partial."""
    meta: dict[str, Any] = {
        "id": answer.sample.id,
        "finish_reason": None if answer.finish is None else _finish_object(answer.finish, len(answer.output_ids)),
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": len(answer.output_ids),
        "cached_tokens": answer.num_cached_tokens,
        "e2e_latency": answer.seconds,
    }
    if answer.timeline is not None:
        meta["timeline"] = answer.timeline
    if answer.transfer is not None:
        meta["kv_transfer"] = {
            "bytes": answer.transfer.num_bytes,
            "writes": answer.transfer.num_writes,
            "pages_exchanged": answer.transfer.num_pages_exchanged,
            "seconds": answer.transfer.seconds,
            "exposed_seconds": answer.transfer.exposed_seconds,
            "gb_per_s": gb_per_s(answer.transfer),
        }
    if answer.speculation is not None:
        meta |= _speculation_fields(answer.speculation)
    if answer.sample.request.return_logprob:
        meta |= _logprob_fields(front, answer, with_text)
    return {"text": answer.text, "output_ids": answer.output_ids, "meta_info": meta}


def _finish_object(finish: FinishReason, num_tokens: int) -> dict[str, Any]:
    if finish.type is FinishType.LENGTH:
        return {"type": "length", "length": num_tokens}
    if finish.type is FinishType.ABORT:
        return {"type": "abort", "message": finish.message}
    return {"type": str(finish.type), "matched": finish.matched}


def _speculation_fields(speculation: SpeculationStats) -> dict[str, Any]:
    """Return the fields about speculation.

    Accept length: output tokens per verification step, including the token that was not proposed.
    """
    steps, proposed = speculation.num_verify_steps, speculation.num_proposed_tokens
    accepted = speculation.num_accepted_tokens
    return {
        "spec_verify_ct": steps,
        "spec_draft_token_num": proposed,
        "spec_accept_token_num": accepted,
        "spec_accept_rate": accepted / proposed,
        "spec_accept_length": 1 + accepted / steps,
    }


def _logprob_fields(front: FrontEnd, answer: SampleAnswer, with_text: bool) -> dict[str, Any]:
    """Return the logprob fields. Entries are [logprob, token id, text or null].

    The first prompt token has no logprob.
    """

    def entry(logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, front.tokenizer.token_text(token_id) if with_text else None]

    def top(logprobs: Sequence[TokenLogprob]) -> list[list[list[Any]]]:
        return [[entry(logprob, token_id) for token_id, logprob in t.top] for t in logprobs]

    request, scored = answer.sample.request, answer.input_logprobs
    fields: dict[str, Any] = {
        "input_token_logprobs": [entry(t.logprob, t.token_id) for t in scored],
        "output_token_logprobs": [entry(t.logprob, t.token_id) for t in answer.logprobs],
    }
    # On a decode worker `logprob_start` is always None: a router puts the prefill's list before this empty one.
    has_first = request.logprob_start == 0
    if has_first:
        fields["input_token_logprobs"].insert(0, entry(None, request.prompt_ids[0]))
    if request.num_top_logprobs:
        fields["input_top_logprobs"] = [*([None] if has_first else []), *top(scored)]
        fields["output_top_logprobs"] = top(answer.logprobs)
    return fields
