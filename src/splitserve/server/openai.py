"""OpenAI API: /v1/completions, /v1/chat/completions, /v1/models. A body becomes a Generation and its reply format."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from openai.types import Model
from starlette.datastructures import Headers

from splitserve.api import validation
from splitserve.api.dispatch import ROLE_HEADER, with_dispatch
from splitserve.api.error_response import json_response
from splitserve.api.fanout import FanOut, PromptSpec, draw_rid, draw_seed, fan_out
from splitserve.api.field_limits import check_fields
from splitserve.api.grammars import openai_grammar
from splitserve.api.operations import OPERATIONS
from splitserve.api.patience import with_patience
from splitserve.api.prompt_tokens import chat_tokens, tokenize
from splitserve.api.schemas import ChatBody, CompletionBody, OpenAIBody
from splitserve.api.stream import stream_response, unless_disconnected
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarSpec
from splitserve.server.chat import ChatForm
from splitserve.server.completions import CompletionForm
from splitserve.server.front_end import FrontEnd
from splitserve.server.generation import Generation
from splitserve.server.openai_reply import Reply, ReplyFormat, dump, frames
from splitserve.server.prompts import bootstraps_of, prompt_spec
from splitserve.server.read_body import check_unknown, read_object, with_warning

DEFAULT_COMPLETION_TOKENS = 16

B = TypeVar("B", bound=OpenAIBody)
# Function of the body, its ids and a name for messages. Returns the form of the response and its samples.
Prepare = Callable[[FrontEnd, B, str | list[str], str], tuple[ReplyFormat, FanOut]]


def openai_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.post("/v1/completions", **OPERATIONS["/v1/completions"])
    async def completions(request: Request) -> Response:
        return await _serve(front, request, CompletionBody, prepare_completion)

    @router.post("/v1/chat/completions", **OPERATIONS["/v1/chat/completions"])
    async def chat_completions(request: Request) -> Response:
        return await _serve(front, request, ChatBody, prepare_chat)

    @router.get("/v1/models", **OPERATIONS["/v1/models"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(front, started)]})

    @router.get("/v1/models/{name:path}", **OPERATIONS["/v1/models/{name}"])
    async def model(name: str) -> Response:
        front.check_model(name)
        return json_response(_model(front, started))

    return router


async def _serve(front: FrontEnd, request: Request, model: type[B], prepare: Prepare[B]) -> Response:
    received_at = front.clock.now()
    work = partial(_prepare_request, front, request.headers, model, prepare)
    is_stream, form, fanout, warning = await read_object(front, request, work)
    response = await _respond(request, form, Generation(front, fanout, received_at), is_stream)
    return with_warning(response, warning)


def _prepare_request(
    front: FrontEnd, headers: Headers, model: type[B], prepare: Prepare[B], found: dict[str, Any]
) -> tuple[bool, ReplyFormat, FanOut, str]:
    """Return whether to stream, the form of the response, its samples, and a warning. Raises SplitserveError."""
    check_fields(found, front.config.server.limits)
    body = validation.parse(model, found)
    rid, name = _rid(body)
    with validation.stage(name, "validation"):
        warning = check_unknown(front, found, model)
        front.check_role(headers.get(ROLE_HEADER))
        form, fanout = prepare(front, body, rid, name)
        fanout = with_patience(fanout, body, headers)
        return bool(body.stream), form, with_dispatch(fanout, body.dispatch, front.info.vocab_size), warning


async def _respond(request: Request, form: ReplyFormat, generation: Generation, is_stream: bool) -> Response:
    if is_stream:
        return await stream_response(request, frames(form, generation), has_journal=generation.has_journal)
    answers = await unless_disconnected(request, generation.complete())
    return Response(dump(form.answer(answers)), media_type="application/json")


def prepare_completion(
    front: FrontEnd, body: CompletionBody, rid: str | list[str], name: str
) -> tuple[CompletionForm, FanOut]:
    """Return the format of the answer and its samples. Raises InvalidRequestError, UnknownModelError."""
    front.check_model(body.model)
    prompts, _ = validation.prompt_list(body.prompt, "prompt")
    max_chars = front.config.server.limits.max_grammar_chars
    grammar = openai_grammar(body, max_chars)
    specs = [
        _spec(
            front,
            body,
            tokenize(front.tokenizer, prompt, front.context_length),
            name="prompt",
            max_new=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
            num_logprobs=body.logprobs,
            grammar=grammar,
            scores_prompt=bool(body.echo) and body.logprobs is not None,
        )
        for prompt in prompts
    ]
    texts = None
    if body.echo:
        texts = [p if isinstance(p, str) else front.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    reply = Reply.of(body, prefix="cmpl", rid=name, model=front.served_model_name)
    form = CompletionForm(reply, front.tokenizer, body.logprobs, texts)
    return form, _fan_out(front, body, specs, rid)


def prepare_chat(front: FrontEnd, body: ChatBody, rid: str | list[str], name: str) -> tuple[ChatForm, FanOut]:
    """Return the format of the answer and its samples. Raises InvalidRequestError, UnknownModelError."""
    front.check_model(body.model)
    token_ids, use = chat_tokens(front.tokenizer, body, front.context_length)
    max_chars = front.config.server.limits.max_grammar_chars
    grammar = openai_grammar(body, max_chars)
    with_logprobs = bool(body.logprobs)
    if body.top_logprobs and not with_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    spec = _spec(
        front,
        body,
        token_ids,
        name="messages",
        max_new=max_tokens,
        num_logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        grammar=use.grammar(grammar, max_chars) if use else grammar,
    )
    reply = Reply.of(body, prefix="chatcmpl", rid=name, model=front.served_model_name)
    form = ChatForm(reply, front.tokenizer, with_logprobs, use.form if use else None)
    return form, _fan_out(front, body, [spec], rid)


def _spec(
    front: FrontEnd,
    body: OpenAIBody,
    token_ids: list[int],
    *,
    name: str,
    max_new: int | None,
    num_logprobs: int | None,
    grammar: GrammarSpec | None,
    scores_prompt: bool = False,
) -> PromptSpec:
    """Return the spec of a prompt. `num_logprobs`: alternatives per token. None: no logprobs."""
    seed = body.seed if body.seed is not None else body.sampling_seed
    return prompt_spec(
        front,
        token_ids,
        body,
        name=name,
        max_new=max_new,
        min_new=body.min_tokens,
        seed=draw_seed() if seed is None else seed,
        return_logprob=num_logprobs is not None,
        num_top_logprobs=num_logprobs or 0,
        logprob_start_len=0 if scores_prompt else -1,
        top_name="logprobs" if isinstance(body, CompletionBody) else "top_logprobs",
        grammar=grammar,
    )


def _fan_out(front: FrontEnd, body: OpenAIBody, specs: list[PromptSpec], rid: str | list[str]) -> FanOut:
    n = 1 if body.n is None else body.n
    validation.check_sample_counts(len(specs), n, front.config.server.limits)
    if isinstance(rid, list):
        validation.per_prompt(rid, len(specs), "rid")
    return fan_out(specs, n, rid, bootstraps_of(front, body, len(specs), n))


def _rid(body: OpenAIBody) -> tuple[str | list[str], str]:
    """Return the request id or ids, and one name for messages and the answer."""
    rid = body.rid or draw_rid()
    return rid, rid if isinstance(rid, str) else rid[0]


def _model(front: FrontEnd, started: int) -> dict[str, Any]:
    model = Model(id=front.served_model_name, object="model", created=started, owned_by="splitserve")
    info = front.scheduler.info
    limit = None if info is None else info.max_total_tokens_per_request
    return model.model_dump(exclude_unset=True) | {"root": front.model_path, "max_model_len": limit}
