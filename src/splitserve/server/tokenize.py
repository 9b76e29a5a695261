"""POST /tokenize and /detokenize: the model's tokenizer over HTTP. They do not use the scheduler."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from splitserve.api import validation
from splitserve.api.error_response import json_response
from splitserve.api.field_limits import check_fields
from splitserve.api.operations import OPERATIONS
from splitserve.api.schemas import DetokenizeBody, TokenizeBody
from splitserve.core.errors import InvalidRequestError
from splitserve.server.front_end import FrontEnd
from splitserve.server.read_body import read_object


def tokenize_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", **OPERATIONS["/tokenize"])
    @router.post("/v1/tokenize", **OPERATIONS["/tokenize"])
    async def tokenize(request: Request) -> Response:
        return json_response(await read_object(front, request, lambda found: _tokenize(front, found)))

    @router.post("/detokenize", **OPERATIONS["/detokenize"])
    @router.post("/v1/detokenize", **OPERATIONS["/detokenize"])
    async def detokenize(request: Request) -> Response:
        return json_response({"text": await read_object(front, request, lambda found: _detokenize(front, found))})

    return router


def _tokenize(front: FrontEnd, found: dict[str, Any]) -> dict[str, Any]:
    """Return tokens and their count. A list of texts yields a list of token lists, and of counts."""
    check_fields(found, front.config.server.limits)
    body = validation.parse(TokenizeBody, found)
    validation.check_exactly_one(body, "prompt", "messages")
    limit = None if front.scheduler.info is None else front.scheduler.info.max_total_tokens_per_request
    adds_special = body.add_special_tokens is not False
    tokens: list[int] | list[list[int]]
    if body.messages is not None:
        chat = validation.chat_messages(body.messages)
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
