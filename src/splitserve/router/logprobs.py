"""Merge of prompt logprobs, which the prefill worker computes, into the decode worker's answer to the client.

For each sample the prefill's values arrive before the decode's. Both answers have the same form: `/generate` with an
object or a list of objects, or a stream of them, each with the `index` of its sample. A completion with `echo` and
`logprobs` already lists the prompt's tokens; there the prefill's values replace nulls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

# Fields of `meta_info` about prompt tokens.
_META_FIELDS = ("input_token_logprobs", "input_top_logprobs")
# Lists of an OpenAI completion's `logprobs`, one entry per token, that only the model can fill.
_CHOICE_FIELDS = ("token_logprobs", "top_logprobs")


def wants_merge(path: str, body: dict[str, Any]) -> bool:
    """Return whether the decode's answer lacks logprobs that only the prefill worker has."""
    if path == "/generate":
        return body.get("return_logprob") not in (None, False, [])
    return path == "/v1/completions" and bool(body.get("echo")) and body.get("logprobs") is not None


def merge_answer(prefill: list[Any], answer: bytes) -> bytes:
    """Return the decode's whole answer with the prompt's logprobs in it. `prefill`: see `merge_event`."""
    parsed = msgspec.json.decode(answer)
    for position, item in enumerate(parsed if isinstance(parsed, list) else [parsed]):
        merge_event(prefill, item, position)
    return msgspec.json.encode(parsed)


def merge_event(prefill: list[Any], item: Any, position: int = 0) -> None:
    """Insert the prompt's logprobs into one answer, or event of a stream, of the decode worker.

    `prefill`: the objects of the prefill's answer: its one object, its list's elements, or the events of its stream.
    """
    if not isinstance(item, dict):
        return
    if isinstance(item.get("meta_info"), dict):
        _merge_meta(_meta_of(prefill, item.get("index", position)), item["meta_info"])
    for choice in _choices(item):
        _merge_choice(_choice_of(prefill, choice.get("index", 0)), choice)


def _merge_meta(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in _META_FIELDS:
        if ours.get(name):
            theirs[name] = [*ours[name], *(theirs.get(name) or [])]


def _meta_of(prefill: list[Any], index: object) -> dict[str, Any]:
    """Return the prefill's meta_info of one sample, from the last object that has prompt logprobs."""
    for position, item in reversed(list(enumerate(prefill))):
        if not isinstance(item, dict) or not isinstance(item.get("meta_info"), dict):
            continue
        if item.get("index", position) == index and item["meta_info"].get("input_token_logprobs"):
            meta: dict[str, Any] = item["meta_info"]
            return meta
    return {}


def _choices(item: Any) -> Iterable[dict[str, Any]]:
    choices = item.get("choices") if isinstance(item, dict) else None
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def _choice_of(prefill: list[Any], index: object) -> dict[str, Any]:
    for item in prefill:
        for choice in _choices(item):
            if choice.get("index", 0) == index and isinstance(choice.get("logprobs"), dict):
                return choice
    return {}


def _merge_choice(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fill in the leading nulls: decode lists prompt tokens with null for values it has not computed."""
    if not ours or not isinstance(theirs.get("logprobs"), dict):
        return
    scores = theirs["logprobs"].get("token_logprobs") or []
    unscored = next((i for i, score in enumerate(scores) if score is not None), len(scores))
    for name in _CHOICE_FIELDS:
        mine, other = ours["logprobs"].get(name), theirs["logprobs"].get(name)
        if isinstance(mine, list) and isinstance(other, list):
            theirs["logprobs"][name] = mine[:unscored] + other[unscored:]
