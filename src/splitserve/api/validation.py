"""Validation: any bytes in, values for the scheduler or an InvalidRequestError with field and remedy out.

1. `parse_object` reads the JSON object of a body, `check_fields` compares its fields with their limits, and rejects
   media. Values of a wrong type pass there.
2. `parse` types a body by its model and rejects wrong types by name.
3. The other functions resolve and check single values.

Fields that the API does not define become a warning for the client. Pure: no tokenizer, no HTTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeGuard, TypeVar, cast

import msgspec
import pydantic

from splitserve.api.schemas import MEDIA_FIELDS, WITHOUT_EFFECT, WITHOUT_EFFECT_IF_FALSE, RequestModel, SamplingFields
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import InvalidRequestError, PromptTooLongError, SplitserveError, did_you_mean
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.limits import LimitsConfig
from splitserve.core.sampling import ResolvedSampling

B = TypeVar("B", bound=RequestModel)

_JSON_TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}
# Expected type in an error's message, by pydantic's error type.
_EXPECTED = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
# Context length in tokens that the limit of a body assumes until the length of a model is known.
DEFAULT_CONTEXT_LENGTH = 32_768
_SCHEDULER_LIMITS = (
    *("max_running_requests", "max_queued_requests", "max_queued_grammars", "grammar_timeout"),
    *("grammar_compile_budget", "grammar_step_budget", "grammar_request_budget", "grammar_memory"),
)
# Numbers of alternatives per token, in the bodies of all routes.
_TOP_LOGPROBS = ("top_logprobs_num", "top_logprobs", "logprobs")
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("ignore_eos", "skip_special_tokens"),
)
WARNING_HEADER = "x-splitserve-warning"
# Unknown fields named in one warning, and characters of a name.
MAX_NAMED = 8
_MAX_NAME_CHARS = 64
# Characters of the ids of a request in an error.
_MAX_ID_CHARS = 256


def parse_object(raw: bytes, limits: LimitsConfig) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises InvalidRequestError."""
    if not raw or raw.isspace():
        raise InvalidRequestError("the body is empty: send a JSON object")
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
    return _JSON_TYPES.get(type(value), type(value).__name__)


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
    """Check all limited fields, and those for media. Raises InvalidRequestError that names the field and its limit."""
    for name in MEDIA_FIELDS:
        if any(part and (name, part) != ("modalities", "text") for part in _as_list(body.get(name))):
            raise InvalidRequestError(f"{name}: this server serves text only; leave the field out", param=name)
    for path, rid in _by_path("rid", body.get("rid")):
        check_chars(path, rid, limits.max_rid_chars, "--max-rid-chars")
    _check_entries("messages", body.get("messages"), limits.max_messages, "--max-messages")
    for name in ("text", "prompt", "input_ids", "sampling_params"):
        value = body.get(name)
        if is_batch(value):
            _check_entries(name, value, limits.max_samples, "--max-samples")
    _check_sampling(body, limits)
    for path, sampling in _by_path("sampling_params", body.get("sampling_params")):
        if isinstance(sampling, dict):
            _check_sampling(sampling, limits, f"{path}.")
    for name in _TOP_LOGPROBS:
        for path, value in _by_path(name, body.get(name)):
            # `logprobs` of a chat is a flag.
            if type(value) is int:
                _check_num_top(path, value, limits.max_top_logprobs)


def _check_sampling(fields: Mapping[str, Any], limits: LimitsConfig, prefix: str = "") -> None:
    """`prefix`: path of the object that holds the fields, with a dot."""
    _check_entries(f"{prefix}stop", fields.get("stop"), limits.max_stop_strings, "--max-stop-strings")
    for path, stop in _by_path(f"{prefix}stop", fields.get("stop")):
        check_chars(path, stop, limits.max_stop_chars, "--max-stop-chars")
    stop_ids, bias = fields.get("stop_token_ids"), fields.get("logit_bias")
    _check_entries(f"{prefix}stop_token_ids", stop_ids, limits.max_stop_token_ids, "--max-stop-token-ids")
    _check_entries(f"{prefix}logit_bias", bias, limits.max_logit_bias, "--max-logit-bias")
    for name in (*GrammarKind, "response_format"):
        grammar = fields.get(name)
        if isinstance(grammar, list | dict):
            grammar = msgspec.json.encode(grammar).decode()
        check_chars(f"{prefix}{name}", grammar, limits.max_grammar_chars, "--max-grammar-chars")
    n = fields.get("n")
    if isinstance(n, int) and n > limits.max_n:
        problem = f"n is {n}: at most {limits.max_n} samples of a prompt are generated (--max-n)"
        raise InvalidRequestError(problem, param=f"{prefix}n")


def _check_entries(path: str, value: object, limit: int, option: str) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise InvalidRequestError(f"{path} has {len(value)} entries: send at most {limit} ({option})", param=path)


def check_chars(path: str, value: object, limit: int, option: str) -> None:
    """Raise InvalidRequestError if the field at `path` is a longer text than that. `option`: sets the limit."""
    if isinstance(value, str) and len(value) > limit:
        raise InvalidRequestError(f"{path} has {len(value)} characters: send at most {limit} ({option})", param=path)


def _as_list(value: object) -> Iterator[Any]:
    yield from value if isinstance(value, list) else (value,)


def _by_path(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each entry of a list, or of the only value."""
    yield from (
        ((f"{path}[{i}]", entry) for i, entry in enumerate(value)) if isinstance(value, list) else ((path, value),)
    )


@contextmanager
def stage(rid: object, name: str) -> Iterator[None]:
    """Add request and stage to errors raised inside the block. `rid`: id or ids as in a body. None: unknown."""
    try:
        yield
    except SplitserveError as error:
        ids = ",".join(request_ids(rid))
        text = ids if len(ids) <= _MAX_ID_CHARS else f"{ids[:_MAX_ID_CHARS]}..."
        error.message = f"request {text}{' ' if text else ''}(stage: {name}): {error.message}"
        raise


def parse(model: type[B], data: object, name: str = "") -> B:
    """Return a body, or its part `name`, as `model`. Raises InvalidRequestError of the first invalid field."""
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise field_error(error, model, data, name) from error


def field_error(
    error: pydantic.ValidationError, model: type[RequestModel], data: object, name: str = ""
) -> InvalidRequestError:
    """Return the error of the first invalid field. `name`: path of the object that holds it. Empty: the body."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # A union has errors of all its types. The type with the deepest, then latest, first error fits best.
    found = [(*_located(data, d["loc"]), d) for d in details if d["loc"][:1] == details[0]["loc"][:1]]
    firsts = {tuple(e for e in d["loc"] if isinstance(e, str)): (at, part, d) for at, part, d in reversed(found)}
    steps, value, _ = max(firsts.values(), key=lambda f: (len(f[0]), [e for e in f[2]["loc"] if type(e) is int]))
    param = name + "".join(steps) if name else "".join(steps).lstrip(".")
    kinds = dict.fromkeys((d["type"], d["msg"]) for at, _, d in found if at == steps)
    kind, text = next(iter(kinds))
    if kind == "extra_forbidden":
        fields = model.model_fields
        hint = did_you_mean(str(details[0]["loc"][-1]), fields, f"use {', '.join(fields)}")
        problem = f"{param} is not a field of this request: {hint}"
    elif kind == "missing":
        param = str(details[0]["loc"][-1])
        problem = f"{param} is missing: send it"
        for key in [key for key in cast(dict[str, Any], data) if key not in model.model_fields][:MAX_NAMED]:
            if hint := did_you_mean(key, [param]):
                param, problem = key, f"{key} is not a field of this request: {hint}"
                break
    elif kind in _EXPECTED:
        expected = dict.fromkeys(_EXPECTED[kind] for kind, _ in kinds if kind in _EXPECTED)
        problem = f"{param or 'body'} has the type {json_type(value)}: send {' or '.join(expected)}"
    else:
        problem = f"{param or 'body'}: {text}"
    return InvalidRequestError(problem, param=param or None)


def _located(value: Any, location: Iterable[str | int]) -> tuple[list[str], Any]:
    """Return path and value of the part at pydantic's location. Entries that name types of a union are skipped."""
    steps = []
    for entry in location:
        if isinstance(value, dict) and entry in value:
            steps.append(f".{entry}")
            value = value[entry]
        elif isinstance(value, list) and isinstance(entry, int):
            steps.append(f"[{entry}]")
            value = value[entry]
    return steps, value


def check_rooms(rooms: object) -> None:
    """Raise InvalidRequestError for a `bootstrap_room` out of range: a room, a list of rooms, or None."""
    for room in _as_list(rooms):
        check_integer(room, "bootstrap_room", range(1 << 63), "an integer in [0, 2^63)")


def check_integer(value: Any, name: str, valid: range, rule: str) -> Any:
    """Return an integer or None. Raises InvalidRequestError if it is something else or not in this range."""
    if value is not None and (type(value) is not int or value not in valid):
        raise InvalidRequestError(f"{name} {value!r}: must be {rule}", param=name)
    return value


def check_exactly_one(body: RequestModel, first: str, second: str) -> None:
    """Raise InvalidRequestError unless exactly one of these two fields is set."""
    given = [name for name in (first, second) if getattr(body, name) is not None]
    if not given:
        raise InvalidRequestError(f"the body has neither {first} nor {second}: send one of them", param=first)
    if len(given) > 1:
        raise InvalidRequestError(f"{first} and {second} exclude each other: send one of them", param=second)


def per_prompt(value: Any, num_prompts: int, name: str) -> list[Any]:
    """Return one value per prompt. `value`: a value for all prompts, or a list with one each."""
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidRequestError(
            f"{name} is a list of {len(value)} for {num_prompts} prompts: give one each", param=name
        )
    return value


def prompt_list(value: str | list[str] | list[int] | list[list[int]], name: str) -> tuple[list[str | list[int]], bool]:
    """Return the prompts, and whether `value` is a batch: a list of texts or of id lists instead of one."""
    if value == []:
        raise InvalidRequestError(f"{name} is empty: send at least one token", param=name)
    if is_batch(value):
        return list(value), True
    return [cast(str | list[int], value)], False


def check_prompt(token_ids: Sequence[int], *, name: str, vocab_size: int, limit: int) -> None:
    """Check the tokens of a prompt. `limit`: prompt and output tokens a request may have."""
    if not token_ids:
        raise InvalidRequestError(f"{name} has no tokens: send at least one", param=name)
    if len(token_ids) >= limit:
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens, but a request has room for {limit}, of which the output needs at "
            f"least one: shorten the prompt to {limit - 1} tokens",
            param=name,
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequestError(f"{name} holds token id {wrong}: ids must be in [0, {vocab_size})", param=name)


def check_logprobs(num_top: int, top_name: str, start: int, num_prompt_tokens: int, limits: LimitsConfig) -> None:
    """Check the alternatives per token, and the first prompt position to score. -1: none."""
    _check_num_top(top_name, num_top, limits.max_top_logprobs)
    if start != -1 and not 0 <= start < num_prompt_tokens:
        raise InvalidRequestError(
            f"logprob_start_len is {start}: it must be -1 (no input logprobs) or in [0, {num_prompt_tokens})",
            param="logprob_start_len",
        )


def _check_num_top(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise InvalidRequestError(f"{name} is {value}: it must be in [0, {limit}] (--max-top-logprobs)", param=name)


def check_hidden_states(is_wanted: bool | None, config: WorkerConfig) -> bool:
    """Return whether hidden states are wanted. Raises InvalidRequestError if this worker does not return them."""
    if is_wanted and not config.model.return_hidden_states:
        raise InvalidRequestError(
            "return_hidden_states: this worker returns no hidden states; start all workers with "
            "--enable-return-hidden-states, or leave the field out",
            param="return_hidden_states",
        )
    return bool(is_wanted)


def sampling_params(
    fields: SamplingFields, *, default_seed: int, grammar: GrammarSpec | None, room: int, vocab_size: int, prefix: str
) -> ResolvedSampling:
    """Return resolved and checked parameters.

    `room`: output tokens that fit. `prefix`: path of the object that holds the fields, with a dot.
    """
    max_new, min_new = fields.output_bounds()
    try:
        logit_bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    except ValueError:
        raise InvalidRequestError("logit_bias: keys must be token ids", param=f"{prefix}logit_bias") from None
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if "" in stop:
        param = f"{prefix}stop" if isinstance(fields.stop, str) else f"{prefix}stop[{stop.index('')}]"
        raise InvalidRequestError("stop holds an empty string, which would match at once: remove it", param=param)
    seeds = (fields.seed, fields.sampling_seed, default_seed)
    given: dict[str, Any] = {
        "max_new_tokens": room if max_new is None else max_new,
        "min_new_tokens": min_new,
        "logit_bias": logit_bias,
        "stop": stop,
        "stop_token_ids": None if fields.stop_token_ids is None else tuple(fields.stop_token_ids),
        "include_stop": bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        "seed": next(seed for seed in seeds if seed is not None),
        "grammar": grammar,
        **{name: getattr(fields, name) for name in _SAME_NAME},
    }
    params = ResolvedSampling(**{name: value for name, value in given.items() if value is not None})
    try:
        params.validate(vocab_size)
    except InvalidRequestError as error:
        # Use the client's names of the parameters.
        own_names, message = fields.own_names(), error.message
        for ours, theirs in own_names.items():
            message = message.replace(ours, theirs)
        raise InvalidRequestError(message, param=prefix + own_names.get(error.param or "", error.param or "")) from None
    # Limit it after validation, because the client's own values must be valid in themselves.
    fits = min(params.max_new_tokens, room)
    return dataclasses.replace(params, max_new_tokens=fits, min_new_tokens=min(params.min_new_tokens, fits))


def request_ids(rid: object) -> list[str]:
    """Return the ids in `rid` of a body: one, or one per prompt."""
    return list(map(str, _as_list([] if rid is None else rid)))


def unknown_fields(body: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> list[str]:
    """Return a description of each unknown field with a value, with the name that was probably meant.

    `prefix`: name of the object that holds them, with a dot.
    """
    names = list(known)
    accepted = WITHOUT_EFFECT.union(names)
    unknown = [name for name, value in body.items() if value is not None and name not in accepted]
    unknown = [name for name in unknown if not (body[name] is False and name in WITHOUT_EFFECT_IF_FALSE)]
    return [f"{prefix}{_described(name, names)}" for name in unknown[:MAX_NAMED]]


def warning(unknown: Sequence[str]) -> str:
    """Return the text about these fields, in ASCII for a header."""
    return f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}"


def _described(name: str, known: Sequence[str]) -> str:
    text, hint = ascii(name[:_MAX_NAME_CHARS])[1:-1], did_you_mean(name, known)
    return f"{text} ({hint})" if hint else text


def worker_limits(config: WorkerConfig, context_length: int) -> dict[str, Any]:
    """Return the limits of a worker: those of its front end, and those of its scheduler's queues and grammars."""
    scheduler = msgspec.to_builtins(config.scheduler)
    return effective_limits(config.server.limits, context_length) | {n: scheduler[n] for n in _SCHEDULER_LIMITS}


def effective_limits(limits: LimitsConfig, context_length: int) -> dict[str, Any]:
    """Return the value of each limit. The limit of a body is computed for this context length in tokens."""
    return {**msgspec.to_builtins(limits), "max_request_bytes": limits.request_bytes(context_length)}
