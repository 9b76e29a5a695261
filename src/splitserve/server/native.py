"""Native API: /generate in the format of SGLang's clients and routers, and the model's tokenizer over HTTP.

Not streamed, the answer of /generate is one object, or a list if the client sent a batch or requested n > 1. Streamed,
every frame contains all text so far of one sample, with its `index` if there are several. Of hidden states a frame has
those of its new tokens only, because they are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from splitserve.api import validation
from splitserve.api.grammars import grammar_of
from splitserve.api.openapi import OPERATIONS
from splitserve.api.prompt_tokens import chat_messages
from splitserve.api.responses import event_of, json_response
from splitserve.api.schemas import DetokenizeBody, GenerateBody, NativeSampling, TokenizeBody
from splitserve.api.validation import check_fields
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind
from splitserve.core.messages import SpeculationStats
from splitserve.core.request import FinishReason, FinishType
from splitserve.observe.worker_metrics import gb_per_s
from splitserve.server.front_end import FrontEnd, read_object
from splitserve.server.generate_route import Prompts, ReplyFormat, prompt_spec, serve
from splitserve.server.generation import Delta, SampleAnswer


def native_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()

    @router.post("/generate", **OPERATIONS["/generate"])
    @router.put("/generate", **OPERATIONS["/generate"])
    async def generate(request: Request) -> Response:
        return await serve(front, request, GenerateBody, read_generate)

    @router.post("/tokenize", **OPERATIONS["/tokenize"])
    @router.post("/v1/tokenize", **OPERATIONS["/tokenize"])
    async def tokenize_route(request: Request) -> Response:
        return json_response(await read_object(front, request, lambda found: _tokenize(front, found)))

    @router.post("/detokenize", **OPERATIONS["/detokenize"])
    @router.post("/v1/detokenize", **OPERATIONS["/detokenize"])
    async def detokenize_route(request: Request) -> Response:
        return json_response({"text": await read_object(front, request, lambda found: _detokenize(front, found))})

    return router


class NativeFormat(ReplyFormat):
    """Reply format of /generate. `is_list`: whether the answer is a list."""

    repeats_logprobs = True

    def __init__(self, front: FrontEnd, *, is_list: bool, with_text: bool) -> None:
        self._front = front
        self._is_list = is_list
        self._with_text = with_text

    def answer(self, answers: Sequence[SampleAnswer]) -> bytes:
        items = [answer_object(self._front, answer, self._with_text) for answer in answers]
        return msgspec.json.encode(items if self._is_list else items[0])

    def frame(self, answer: SampleAnswer, delta: Delta, answers: Sequence[SampleAnswer]) -> bytes:
        frame = answer_object(self._front, answer, self._with_text)
        if self._is_list:
            frame["index"] = answer.sample.index
        return event_of(msgspec.json.encode(frame))


def read_generate(front: FrontEnd, body: GenerateBody, rid: str | list[str]) -> Prompts:
    """Return the prompts of a body and its reply format. Raises InvalidRequestError."""
    validation.check_exactly_one(body, "text", "input_ids")
    name, value = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    assert value is not None
    prompts, is_batch = validation.prompt_list(value, name)

    def per_prompt(field: str) -> list[Any]:
        return validation.per_prompt(getattr(body, field), len(prompts), field)

    each = isinstance(body.sampling_params, list)
    paths = [f"sampling_params[{i}]" if each else "sampling_params" for i in range(len(prompts))]
    sampling = [
        validation.parse(NativeSampling, {} if s is None else s, path)
        for path, s in zip(paths, per_prompt("sampling_params"), strict=True)
    ]
    counts = {1 if s.n is None else s.n for s in sampling}
    if len(counts) != 1:
        raise InvalidRequestError(
            f"n differs between the prompts of a batch ({sorted(counts)}): send one n", param="sampling_params"
        )
    n = counts.pop()
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_hidden_states")
    wanted = zip(*map(per_prompt, names), strict=True)
    specs = [
        prompt_spec(
            front,
            front.tokenizer.encode(prompt, max_tokens=front.context_length, name=name),
            params,
            grammar_of(params, f"{path}."),
            name=name,
            num_logprobs=(num_top or 0) if has_logprobs else None,
            top_name="top_logprobs_num",
            logprob_start=-1 if start is None or not has_logprobs else start,
            hidden_states=has_states,
            prefix=f"{path}.",
        )
        for prompt, path, params, (has_logprobs, start, num_top, has_states) in zip(
            prompts, paths, sampling, wanted, strict=True
        )
    ]
    kind = next((kind for params in sampling for kind in GrammarKind if getattr(params, kind) is not None), "")
    reply = NativeFormat(front, is_list=is_batch or n > 1, with_text=bool(body.return_text_in_logprobs))
    return Prompts(specs, n, reply, "sampling_params" if each else f"sampling_params.{kind}")


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
    if answer.sample.is_fake:
        meta["fake_transfer"] = True
    if answer.finish is not None and answer.stages.entered:
        meta["timeline"] = answer.stages.seconds
    if answer.transfer is not None:
        meta["kv_transfer"] = {
            "bytes": answer.transfer.num_bytes,
            "writes": answer.transfer.num_writes,
            "pages_exchanged": answer.transfer.num_pages_exchanged,
            "seconds": answer.transfer.seconds,
            "exposed_seconds": answer.transfer.exposed_seconds,
            "gb_per_s": gb_per_s(answer.transfer),
        }
    if answer.finish is not None and answer.speculation is not None:
        meta |= _speculation_fields(answer.speculation)
    if answer.sample.request.return_logprob:
        meta |= _logprob_fields(front, answer, with_text)
    if answer.sample.request.return_hidden_states:
        meta["hidden_states"] = answer.take_hidden_states()
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
    # On the decode worker of a pair `logprob_start` is None: a router puts the prefill's list before this empty one.
    has_first = request.logprob_start == 0
    if has_first:
        fields["input_token_logprobs"].insert(0, entry(None, request.prompt_ids[0]))
    if request.num_top_logprobs:
        fields["input_top_logprobs"] = [*([None] if has_first else []), *top(scored)]
        fields["output_top_logprobs"] = top(answer.logprobs)
    return fields


def _tokenize(front: FrontEnd, found: dict[str, Any]) -> dict[str, Any]:
    """Return tokens and their count. A list of texts yields a list of token lists, and of counts."""
    check_fields(found, front.config.server.limits)
    body = validation.parse(TokenizeBody, found)
    validation.check_exactly_one(body, "prompt", "messages")
    limit = None if front.scheduler.info is None else front.scheduler.info.max_total_tokens_per_request
    adds_special = body.add_special_tokens is not False
    tokens: list[int] | list[list[int]]
    if body.messages is not None:
        chat = chat_messages(body.messages)
        tokens = front.tokenizer.encode_chat(chat, add_generation_prompt=body.add_generation_prompt is not False)
    elif isinstance(body.prompt, list):
        tokens = [front.tokenizer.encode(text, add_special_tokens=adds_special) for text in body.prompt]
        return {"tokens": tokens, "count": [len(t) for t in tokens], "max_model_len": limit}
    else:
        tokens = front.tokenizer.encode(body.prompt or "", add_special_tokens=adds_special)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": limit}


def _detokenize(front: FrontEnd, found: dict[str, Any]) -> str | list[str]:
    body = validation.parse(DetokenizeBody, found)
    vocab_size = front.tokenizer.vocab_size if front.scheduler.info is None else front.scheduler.info.vocab_size
    lists, is_batch = validation.prompt_list(body.tokens, "tokens") if body.tokens else ([[]], False)
    texts = []
    for ids in lists:
        assert isinstance(ids, list)
        wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"tokens holds id {wrong}: ids must be in [0, {vocab_size})", param="tokens")
        texts.append(front.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens is not False))
    return texts if is_batch else texts[0]
