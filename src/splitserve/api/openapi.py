"""OpenAPI description of an app, built from the declarations of its routes.

A route passes `operation(...)` to its FastAPI decorator, which has the path and the method. `describe` adds what
FastAPI does not know: the schemas of bodies that the routes parse themselves, the shape of errors, and API keys.
`shared_operations` describes the routes that router and workers share.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from splitserve.api.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody

Schema = dict[str, Any]
# Keyword arguments of a FastAPI route.
Operation = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}

_ASSETS = "/docs/assets"
# Paths with equal content in every installation. They need no key, because browsers send none.
DOCS_PATHS = (
    *("/docs", "/openapi.json"),
    *(f"{_ASSETS}/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")),
)

_REFERENCE = "#/components/schemas/{model}"
_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The API key is not for this route.",
    404: "The model, worker or route does not exist.",
    408: "The body was not complete in time.",
    409: "The request conflicts with one that is served.",
    413: "The body is larger than --max-request-bytes.",
    415: "The body is compressed.",
    422: "The grammar of the request exceeded its budget.",
    429: "The caller exceeded its rate; retry after `Retry-After` seconds.",
    499: "The request was aborted.",
    500: "The worker failed; `code` is the reason.",
    502: "A worker was lost while it served the request.",
    503: "Not ready or at capacity; retry after `Retry-After` seconds.",
    504: "A deadline passed.",
}
# Statuses of the checks before a route: API key, size, encoding and time of the body, memory.
_EDGE = (401, 403, 408, 413, 415, 503)
# Error statuses of routes that generate, in addition to `_EDGE`.
GENERATE_ERRORS = (400, 404, 409, 422, 499, 500, 504)
# Error statuses of routes that the router forwards to a worker, in addition to `_EDGE`.
UPSTREAM_ERRORS = (400, 404, 429, 500, 502, 504)


def new_app(title: str, version: str, **options: Any) -> FastAPI:
    """Return an app with a /docs page that loads nothing from other servers."""
    parameters = {"validatorUrl": None}
    return FastAPIOffline(
        "/docs", None, title=title, version=version, static_url=_ASSETS, swagger_ui_parameters=parameters, **options
    )


def index(name: str, version: str, links: Collection[str], **details: Any) -> dict[str, Any]:
    """Return the body of GET /: name, version and the main routes."""
    return {"name": name, "version": version, **details, "links": ["/docs", "/openapi.json", *links]}


def fields(**properties: Schema) -> Schema:
    """Return the schema of an object with at least these fields."""
    return {"type": "object", "required": list(properties), "properties": properties}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


INDEX = fields(name=TEXT, version=TEXT, links=list_of(TEXT))
# An event of a stream. OpenAPI 3.2 defines itemSchema; readers of 3.1 ignore it.
_EVENT = fields(data={**TEXT, "description": "JSON of a part of the answer, or of an error; finally [DONE]"})
_ERROR = {"error": fields(message=TEXT, type=TEXT, param=or_null(TEXT), code={"type": ["string", "integer"]})}


def operation(
    summary: str,
    *,
    body: type[BaseModel] | None = None,
    answer: Schema | None = None,
    media_type: str = "application/json",
    streams: bool = False,
    errors: Collection[int] = (),
    unavailable: Schema | None = None,
) -> Operation:
    """Return the keyword arguments that describe a route.

    `answer`: schema of a 200. None: it has no body. `streams`: `stream: true` in the body selects Server-Sent Events.
    `unavailable`: schema of a 503 that is no error object.
    """
    content: Schema = {} if answer is None else {media_type: {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"itemSchema": _EVENT}
    done = {"description": "Done."} | ({"content": content} if content else {})
    extra: Schema = {}
    if body is not None:
        schema = {"$ref": _REFERENCE.format(model=body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        # The schema of the body is built with the first description, not at startup.
        extra["x-body"] = f"{body.__module__}:{body.__qualname__}"
    responses: dict[int, Any] = {200: done} | {status: _error(status) for status in sorted({*_EDGE, *errors})}
    if unavailable is not None:
        known = responses[503]["content"]["application/json"]
        known["schema"] = {"anyOf": [unavailable, known["schema"]]}
    return {"summary": summary, "response_class": Response, "responses": responses, "openapi_extra": extra}


def describe(app: FastAPI) -> None:
    """Complete `app.openapi`."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _complete(schema)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _error(status: int) -> Schema:
    schema = {"$ref": _REFERENCE.format(model="Error")}
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}


def _complete(schema: Schema) -> Schema:
    names = set()
    for operation in (operation for item in schema["paths"].values() for operation in item.values()):
        # FastAPI assumes that it validates parameters itself.
        if "HTTPValidationError" in str(operation["responses"].get("422")):
            del operation["responses"]["422"]
        if "x-body" in operation:
            names.add(operation.pop("x-body"))
    models: list[type[BaseModel]] = [pkgutil.resolve_name(name) for name in sorted(names)]
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    schema["components"] = {
        "schemas": {**found.get("$defs", {}), "Error": fields(**_ERROR)},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    # A key is required only if the operator configured keys.
    schema["security"] = [{}, {"key": []}]
    return schema


# One state per output token.
_HIDDEN_STATES = list_of(list_of({"type": "number"}))
_META = {**OBJECT, "properties": {"hidden_states": _HIDDEN_STATES}}
_ONE = fields(text=TEXT, output_ids=list_of(INTEGER), meta_info=_META)
_GENERATED: Schema = {"anyOf": [_ONE, list_of(_ONE)]}
_USAGE = fields(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
_COMPLETION = fields(text=TEXT, index=INTEGER, finish_reason=or_null(TEXT))
_CHAT = fields(message=fields(role=TEXT, content=or_null(TEXT)), index=INTEGER, finish_reason=or_null(TEXT))
_MODEL = fields(id=TEXT, object={"const": "model"}, created=INTEGER, owned_by=TEXT)
_MODELS = fields(object={"const": "list"}, data=list_of(_MODEL))
_TEXTS = fields(text={"anyOf": [TEXT, list_of(TEXT)]})
_INTEGERS: Schema = list_of(INTEGER)
_TOKENIZED = fields(
    tokens={"anyOf": [_INTEGERS, list_of(_INTEGERS)]},
    count={"anyOf": [INTEGER, _INTEGERS]},
    max_model_len=or_null(INTEGER),
)
_MODEL_INFO = fields(model_path=TEXT, served_model_name=TEXT, max_model_len=INTEGER)


def shared_operations(also: tuple[int, ...] = ()) -> dict[str, Operation]:
    """Return the operations by path. `also`: further statuses of their errors."""

    def shared(summary: str, answer: Schema, errors: tuple[int, ...] = (), **more: Any) -> Operation:
        return operation(summary, answer=answer, errors=(*errors, *also), **more)

    def generate(summary: str, body: type[BaseModel], answer: Schema) -> Operation:
        return shared(summary, answer, GENERATE_ERRORS, body=body, streams=True)

    completion, chat = _openai_answer("text_completion", _COMPLETION), _openai_answer("chat.completion", _CHAT)
    model_info = shared("Describe the model", _MODEL_INFO)
    return {
        "/generate": generate("Generate from text or token ids", GenerateBody, _GENERATED),
        "/v1/completions": generate("Complete text or token ids (OpenAI)", CompletionBody, completion),
        "/v1/chat/completions": generate("Answer a chat (OpenAI)", ChatBody, chat),
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/v1/models": shared("List the models (OpenAI)", _MODELS),
        "/v1/models/{name}": shared("Describe one model (OpenAI)", _MODEL, (404,)),
        "/tokenize": shared("Tokenize a prompt or a chat", _TOKENIZED, (400, 404), body=TokenizeBody),
        "/detokenize": shared("Return the text of token ids", _TEXTS, (400, 404), body=DetokenizeBody),
    }


def _openai_answer(name: str, choice: Schema) -> Schema:
    choice = {**choice, "properties": {**choice["properties"], "hidden_states": _HIDDEN_STATES}}
    return fields(id=TEXT, object={"const": name}, created=INTEGER, model=TEXT, choices=list_of(choice), usage=_USAGE)


# Operations of a worker.
OPERATIONS = shared_operations()
