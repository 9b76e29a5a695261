"""Limits of single fields of a generation request, checked on the parsed JSON before any other processing.

Values of a wrong type pass: the worker's validation rejects them by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from splitserve.api.prompt_batch import is_batch
from splitserve.core.config import LimitsConfig
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind


def check_fields(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Check all limited fields. Raises InvalidRequestError that names the field and its limit."""
    for rid in _as_list(body.get("rid")):
        _check_chars("rid", rid, limits.max_rid_chars)
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
        _check_chars("stop", stop, limits.max_stop_chars)
    _check_entries("stop_token_ids", fields.get("stop_token_ids"), limits.max_stop_token_ids)
    _check_entries("logit_bias", fields.get("logit_bias"), limits.max_logit_bias)
    for kind in GrammarKind:
        _check_chars(kind.value, fields.get(kind), limits.max_grammar_chars)
    n = fields.get("n")
    if isinstance(n, int) and n > limits.max_n:
        raise InvalidRequestError(f"n is {n}: at most {limits.max_n} samples of a prompt are generated", param="n")


def _check_entries(name: str, value: object, limit: int) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise InvalidRequestError(f"{name} has {len(value)} entries: send at most {limit}", param=name)


def _check_chars(name: str, value: object, limit: int) -> None:
    if isinstance(value, str) and len(value) > limit:
        raise InvalidRequestError(f"{name} has {len(value)} characters: send at most {limit}", param=name)


def _as_list(value: object) -> Iterator[Any]:
    yield from value if isinstance(value, list) else (value,)
