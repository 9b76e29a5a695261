"""OpenAPI descriptions of the routes that router and workers share, with the same bodies and answers."""

from __future__ import annotations

from splitserve.api.openapi import (
    GENERATE_ERRORS,
    INTEGER,
    OBJECT,
    TEXT,
    Operation,
    Schema,
    fields,
    list_of,
    operation,
    or_null,
)
from splitserve.api.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody

_ONE = fields(text=TEXT, output_ids=list_of(INTEGER), meta_info=OBJECT)
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
    return _generate_operations((*GENERATE_ERRORS, *also)) | {
        "/model_info": (model_info := operation("Describe the model", answer=_MODEL_INFO, errors=also)),
        "/get_model_info": model_info,
        "/v1/models": operation("List the models (OpenAI)", answer=_MODELS, errors=also),
        "/v1/models/{name}": operation("Describe one model (OpenAI)", answer=_MODEL, errors=(404, *also)),
        "/tokenize": operation(
            "Tokenize a prompt or a chat", body=TokenizeBody, answer=_TOKENIZED, errors=(400, 404, *also)
        ),
        "/detokenize": operation(
            "Return the text of token ids", body=DetokenizeBody, answer=_TEXTS, errors=(400, 404, *also)
        ),
    }


def _generate_operations(errors: tuple[int, ...]) -> dict[str, Operation]:
    completion, chat = _openai_answer("text_completion", _COMPLETION), _openai_answer("chat.completion", _CHAT)
    return {
        "/generate": operation(
            "Generate from text or token ids", body=GenerateBody, answer=_GENERATED, streams=True, errors=errors
        ),
        "/v1/completions": operation(
            "Complete text or token ids (OpenAI)", body=CompletionBody, answer=completion, streams=True, errors=errors
        ),
        "/v1/chat/completions": operation(
            "Answer a chat (OpenAI)", body=ChatBody, answer=chat, streams=True, errors=errors
        ),
    }


def _openai_answer(name: str, choice: Schema) -> Schema:
    return fields(id=TEXT, object={"const": name}, created=INTEGER, model=TEXT, choices=list_of(choice), usage=_USAGE)


# Operations of a worker.
OPERATIONS = shared_operations()
