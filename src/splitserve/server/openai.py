"""OpenAI API: /v1/completions, /v1/chat/completions, /v1/models. A body becomes prompts and a reply format."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from openai.types import Model

from splitserve.api import validation
from splitserve.api.error_response import json_response
from splitserve.api.grammars import openai_grammar
from splitserve.api.openapi import OPERATIONS
from splitserve.api.prompt_tokens import chat_tokens, tokenize
from splitserve.api.schemas import ChatBody, CompletionBody
from splitserve.core.errors import InvalidRequestError
from splitserve.server.front_end import FrontEnd
from splitserve.server.generate_route import Prompts, serve
from splitserve.server.openai_formats import ChatFormat, CompletionFormat
from splitserve.server.prompts import prompt_spec


def openai_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.post("/v1/completions", **OPERATIONS["/v1/completions"])
    async def completions(request: Request) -> Response:
        return await serve(front, request, CompletionBody, read_completion)

    @router.post("/v1/chat/completions", **OPERATIONS["/v1/chat/completions"])
    async def chat_completions(request: Request) -> Response:
        return await serve(front, request, ChatBody, read_chat)

    @router.get("/v1/models", **OPERATIONS["/v1/models"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(front, started)]})

    @router.get("/v1/models/{name:path}", **OPERATIONS["/v1/models/{name}"])
    async def model(name: str) -> Response:
        front.check_model(name)
        return json_response(_model(front, started))

    return router


def read_completion(front: FrontEnd, body: CompletionBody, rid: str | list[str]) -> Prompts:
    """Return the prompts of a body and its reply format. Raises InvalidRequestError, UnknownModelError."""
    front.check_model(body.model)
    prompts, _ = validation.prompt_list(body.prompt, "prompt")
    grammar = openai_grammar(body)
    specs = [
        prompt_spec(
            front,
            tokenize(front.tokenizer, prompt, front.context_length),
            body,
            grammar,
            name="prompt",
            num_logprobs=body.logprobs,
            top_name="logprobs",
            logprob_start=0 if body.echo and body.logprobs is not None else -1,
        )
        for prompt in prompts
    ]
    echo = None
    if body.echo:
        echo = [p if isinstance(p, str) else front.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    return Prompts(specs, 1 if body.n is None else body.n, CompletionFormat(front, body, rid, echo))


def read_chat(front: FrontEnd, body: ChatBody, rid: str | list[str]) -> Prompts:
    """Return the prompt of a conversation and its reply format. Raises InvalidRequestError, UnknownModelError."""
    front.check_model(body.model)
    token_ids, use = chat_tokens(front.tokenizer, body, front.context_length)
    grammar = openai_grammar(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    spec = prompt_spec(
        front,
        token_ids,
        body,
        use.grammar(grammar, front.config.server.limits.max_grammar_chars) if use else grammar,
        name="messages",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        top_name="top_logprobs",
    )
    return Prompts([spec], 1 if body.n is None else body.n, ChatFormat(front, body, rid, use.form if use else None))


def _model(front: FrontEnd, started: int) -> dict[str, Any]:
    model = Model(id=front.served_model_name, object="model", created=started, owned_by="splitserve")
    info = front.scheduler.info
    limit = None if info is None else info.max_total_tokens_per_request
    return model.model_dump(exclude_unset=True) | {"root": front.model_path, "max_model_len": limit}
