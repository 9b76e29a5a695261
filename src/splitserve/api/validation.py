"""Validation: converts the client's values for the scheduler, or raises InvalidRequestError with field and remedy.

Fields that the API does not define become a warning for the client. Pure: no tokenizer, no HTTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar, cast

import pydantic

from splitserve.api.json_body import is_batch
from splitserve.api.schemas import RequestModel, SamplingFields
from splitserve.core.errors import InvalidRequestError, PromptTooLongError, SplitserveError
from splitserve.core.grammar import GrammarSpec
from splitserve.core.limits import LimitsConfig
from splitserve.core.sampling import ResolvedSampling

MAX_TOP_LOGPROBS = 20

B = TypeVar("B", bound=RequestModel)
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("ignore_eos", "skip_special_tokens"),
)
_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Maximum number of characters of an invalid value that an error repeats.
_MAX_ECHO = 32
WARNING_HEADER = "x-splitserve-warning"
# Fields of the OpenAI API that change nothing in the output of any server.
_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "extra_body"}
)
# Unknown fields named in one warning, and characters of a name.
MAX_NAMED = 8
_MAX_NAME_CHARS = 64


@contextmanager
def stage(rid: str, name: str) -> Iterator[None]:
    """Add request and stage to errors raised inside the block."""
    try:
        yield
    except SplitserveError as error:
        error.message = f"request {rid} (stage: {name}): {error.message}"
        raise


def parse(model: type[B], data: object) -> B:
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise _type_error(error) from error


def _type_error(error: pydantic.ValidationError) -> InvalidRequestError:
    """Return the error of the first invalid field, with all types that it may have."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    param = str(details[0]["loc"][0]) if details[0]["loc"] else None
    forms = dict.fromkeys(d["msg"] for d in details if not d["loc"] or str(d["loc"][0]) == param)
    return InvalidRequestError(f"{param or 'body'}: {'; or '.join(list(forms)[:4])}", param=param)


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


def check_sample_counts(num_prompts: int, n: int, limits: LimitsConfig) -> None:
    if not 1 <= n <= limits.max_n:
        raise InvalidRequestError(f"n is {n}: it must be in [1, {limits.max_n}]", param="n")
    if num_prompts * n > limits.max_samples:
        problem = f"{num_prompts} prompts with n = {n} are {num_prompts * n} samples"
        raise InvalidRequestError(f"{problem}: send {limits.max_samples} at most")


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


def check_top_logprobs(number: int, name: str) -> None:
    if not 0 <= number <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"{name} is {number}: it must be in [0, {MAX_TOP_LOGPROBS}]", param=name)


def logprob_start(start: int, num_prompt_tokens: int) -> int | None:
    """Return the first prompt position to score. -1: none."""
    if start == -1:
        return None
    if not 0 <= start < num_prompt_tokens:
        raise InvalidRequestError(
            f"logprob_start_len is {start}: it must be -1 (no input logprobs) or in [0, {num_prompt_tokens})",
            param="logprob_start_len",
        )
    return start


def sampling_params(
    fields: SamplingFields, *, default_seed: int, grammar: GrammarSpec | None, room: int, vocab_size: int
) -> ResolvedSampling:
    """Return resolved and checked parameters. `room`: output tokens that fit."""
    max_new, min_new = fields.output_bounds()
    seeds = (fields.seed, fields.sampling_seed, default_seed)
    given: dict[str, Any] = {
        "max_new_tokens": room if max_new is None else max_new,
        "min_new_tokens": min_new,
        "logit_bias": None if fields.logit_bias is None else _logit_bias(fields.logit_bias),
        "stop": _stop_strings(fields.stop),
        "stop_token_ids": None if fields.stop_token_ids is None else tuple(fields.stop_token_ids),
        "include_stop": bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        "seed": next(seed for seed in seeds if seed is not None),
        "grammar": grammar,
    }
    for name in _SAME_NAME:
        given[name] = getattr(fields, name)
    params = ResolvedSampling(**{name: value for name, value in given.items() if value is not None})
    try:
        params.validate(vocab_size)
    except InvalidRequestError as error:
        raise _in_own_words(error, fields.own_names()) from None
    # Limit it after validation, because the client's own values must be valid in themselves.
    fits = min(params.max_new_tokens, room)
    return dataclasses.replace(params, max_new_tokens=fits, min_new_tokens=min(params.min_new_tokens, fits))


def _in_own_words(error: InvalidRequestError, own_names: Mapping[str, str]) -> InvalidRequestError:
    """Return the same error with the client's names of the parameters."""
    message = error.message
    for ours, theirs in own_names.items():
        message = message.replace(ours, theirs)
    return InvalidRequestError(message, param=own_names.get(error.param or "", error.param))


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in strings:
        raise InvalidRequestError("stop holds an empty string, which would match at once: remove it", param="stop")
    return strings


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequestError("logit_bias: keys must be token ids", param="logit_bias") from None


def chat_messages(
    messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False
) -> list[dict[str, Any]]:
    """Return the messages with their contents as plain text, ready for a chat template."""
    if not messages:
        raise InvalidRequestError("messages is empty: send at least one", param="messages")
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}].role is missing or no string", param="messages")
        if message["role"] not in _CHAT_ROLES:
            raise InvalidRequestError(
                f"messages[{i}].role is {message['role'][:_MAX_ECHO]!r}: give one of {', '.join(_CHAT_ROLES)}",
                param="messages",
            )
        chat.append({**message, "content": _content_text(message.get("content"), i)})
    if continue_final_message and chat[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a final message of the assistant to continue", param="continue_final_message"
        )
    return chat


def _content_text(content: object, i: int) -> str:
    """Return the text of a string, a list of text parts, or null (an assistant's message with only tool calls)."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"messages[{i}].content must be a string or a list of parts", param="messages")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"messages[{i}].content[{j}] is of type {kind!r}: this model takes parts "
                '{"type": "text", "text": "..."} only',
                param="messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def unknown_fields(body: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> list[str]:
    """Return a description of each unknown field with a value, with the name that was probably meant.

    `prefix`: name of the object that holds them, with a dot.
    """
    names = list(known)
    return [f"{prefix}{_described(name, names)}" for name in islice(_unknown(body, names), MAX_NAMED)]


def warning(unknown: Sequence[str]) -> str:
    """Return the text about these fields, in ASCII for a header."""
    return f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}"


def _unknown(body: Mapping[str, Any], known: Iterable[str]) -> Iterator[str]:
    accepted = _WITHOUT_EFFECT.union(known)
    return (name for name, value in body.items() if value is not None and name not in accepted)


def _described(name: str, known: Sequence[str]) -> str:
    text = ascii(name[:_MAX_NAME_CHARS])[1:-1]
    near = get_close_matches(name, known, n=1) if len(name) <= _MAX_NAME_CHARS else []
    return f"{text} (did you mean {near[0]}?)" if near else text
