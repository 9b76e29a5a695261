"""JSON body of a request: any bytes in, an object with fields within their limits or an InvalidRequestError out.

The limits of single fields are checked before any other processing. Values of a wrong type pass, because the worker's
validation rejects them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeGuard

import msgspec

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind
from splitserve.core.limits import LimitsConfig

_JSON_TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}
# Context length in tokens that the limit of a body assumes until the length of a model is known.
DEFAULT_CONTEXT_LENGTH = 32_768
_SCHEDULER_LIMITS = (
    *("max_running_requests", "max_queued_requests", "max_queued_grammars", "grammar_timeout"),
    *("grammar_compile_budget", "grammar_step_budget", "grammar_request_budget", "grammar_memory"),
)


def parse_object(raw: bytes, limits: LimitsConfig) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises InvalidRequestError."""
    depth_problem = f"the body is nested deeper than {limits.max_json_depth} levels: flatten it"
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidRequestError(depth_problem) from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8: send JSON in UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body is a JSON {json_type(body)}: send an object")
    if _depth(body, limits.max_json_depth + 1) > limits.max_json_depth:
        raise InvalidRequestError(depth_problem)
    return body


def json_type(value: object) -> str:
    """Return JSON's name for the type of a decoded value."""
    return _JSON_TYPES[type(value)]


def _depth(value: Any, at_most: int) -> int:
    """Return the number of nested levels, counted up to `at_most`."""
    level: list[Any] = [value]
    depth = 0
    while level and depth < at_most:
        depth += 1
        children: Iterable[Any] = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [child for child in children if isinstance(child, dict | list)]
    return depth


def is_batch(prompt: object) -> TypeGuard[list[Any]]:
    """Return whether `prompt` is a list of prompts. A text or a list of token ids is one prompt, and [] is none."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def check_fields(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Check all limited fields. Raises InvalidRequestError that names the field and its limit."""
    for rid in _as_list(body.get("rid")):
        check_chars("rid", rid, limits.max_rid_chars)
    _check_entries("messages", body.get("messages"), limits.max_messages)
    for name in ("text", "prompt", "input_ids", "sampling_params"):
        value = body.get(name)
        if is_batch(value):
            _check_entries(name, value, limits.max_samples)
    for sampling in (body, *_as_list(body.get("sampling_params"))):
        if isinstance(sampling, dict):
            _check_sampling(sampling, limits)


def _check_sampling(fields: Mapping[str, Any], limits: LimitsConfig) -> None:
    _check_entries("stop", fields.get("stop"), limits.max_stop_strings)
    for stop in _as_list(fields.get("stop")):
        check_chars("stop", stop, limits.max_stop_chars)
    _check_entries("stop_token_ids", fields.get("stop_token_ids"), limits.max_stop_token_ids)
    _check_entries("logit_bias", fields.get("logit_bias"), limits.max_logit_bias)
    for name in (*GrammarKind, "response_format"):
        grammar = fields.get(name)
        if isinstance(grammar, list | dict):
            grammar = msgspec.json.encode(grammar).decode()
        check_chars(name, grammar, limits.max_grammar_chars)
    n = fields.get("n")
    if isinstance(n, int) and n > limits.max_n:
        raise InvalidRequestError(f"n is {n}: at most {limits.max_n} samples of a prompt are generated", param="n")


def _check_entries(name: str, value: object, limit: int) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise InvalidRequestError(f"{name} has {len(value)} entries: send at most {limit}", param=name)


def check_chars(name: str, value: object, limit: int) -> None:
    """Raise InvalidRequestError if the field `name` is a longer text than that."""
    if isinstance(value, str) and len(value) > limit:
        raise InvalidRequestError(f"{name} has {len(value)} characters: send at most {limit}", param=name)


def _as_list(value: object) -> Iterator[Any]:
    yield from value if isinstance(value, list) else (value,)


def worker_limits(config: WorkerConfig, context_length: int) -> dict[str, Any]:
    """Return the limits of a worker: those of its front end, and those of its scheduler's queues and grammars."""
    scheduler = msgspec.to_builtins(config.scheduler)
    return effective_limits(config.server.limits, context_length) | {n: scheduler[n] for n in _SCHEDULER_LIMITS}


def effective_limits(limits: LimitsConfig, context_length: int) -> dict[str, Any]:
    """Return the value of each limit. The limit of a body is computed for this context length in tokens."""
    return {**msgspec.to_builtins(limits), "max_request_bytes": limits.request_bytes(context_length)}
