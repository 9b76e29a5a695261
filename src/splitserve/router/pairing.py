"""Conversion of one client request into the requests for a pair of workers, and of their answers into one.

Both workers get the same body. It is the client's, plus
- `bootstrap_host`, `bootstrap_port`, `bootstrap_room`: address and room of the rendezvous. Lists of equal length for a
  batch and for n > 1: one room per sample;
- `data_parallel_rank`, if the policy chose a rank of the prefill worker;
- `rid`, if the client gave none, so that an abort by id reaches both;
- a seed, if the client gave none, so that both workers sample the same tokens.

The client gets decode's answer with the prompt's logprobs, which only the prefill worker has. For each sample the
prefill's values arrive before the decode's. Both answers have the same form: `/generate` with an object or a list of
objects, or a stream of them, each with the `index` of its sample. A completion with `echo` and `logprobs` already lists
the prompt's tokens; there the prefill's values replace nulls.

Pure: a dictionary in, a dictionary out. Values of a wrong type pass through, because the workers reject them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from splitserve.api.validation import is_batch
from splitserve.core.errors import InvalidRequestError
from splitserve.core.limits import LimitsConfig

Body = dict[str, Any]

# Fields of `meta_info` about prompt tokens.
_META_FIELDS = ("input_token_logprobs", "input_top_logprobs")
# Lists of an OpenAI completion's `logprobs`, one entry per token, that only the model can fill.
_CHOICE_FIELDS = ("token_logprobs", "top_logprobs")


def random_room() -> int:
    """Return a random room in [0, 2^63). Two requests share one with a probability of 2^-63."""
    return secrets.randbits(63)


def with_identity(path: str, body: Body) -> Body:
    """Return the client's body with the values that must be equal in every attempt: its id and its seeds.

    A seed that is drawn for a whole batch is marked in `dispatch`. Workers derive the seed of each prompt from it.
    """
    own = dict(body)
    if own.get("rid") is None:
        own["rid"] = secrets.token_hex(16)
    if path == "/generate":
        given = body.get("sampling_params")
        own["sampling_params"] = _with_seeds(given)
    else:
        given = body
        own = _with_seed(own)
    has_drawn = given is None or (isinstance(given, dict) and not _has_seed(given))
    return own | {"dispatch": {"has_drawn_seed": has_drawn}}


def with_rooms(
    path: str,
    body: Body,
    host: str,
    port: int | None,
    room: Callable[[], int] = random_room,
    *,
    prefill_rank: int | None = None,
) -> Body:
    """Return the body with the rendezvous of a pair.

    `prefill_rank`: data parallel rank of the prefill worker, unless the client gave one.
    """
    num_samples, is_list = _count_samples(path, body)
    paired = dict(body)
    if prefill_rank is not None and body.get("data_parallel_rank") is None:
        paired["data_parallel_rank"] = prefill_rank
    if is_list:
        paired["bootstrap_host"] = [host] * num_samples
        paired["bootstrap_port"] = [port] * num_samples
        paired["bootstrap_room"] = [room() for _ in range(num_samples)]
    else:
        paired["bootstrap_host"], paired["bootstrap_port"], paired["bootstrap_room"] = host, port, room()
    return paired


def without_rooms(body: Body) -> Body:
    """Return the body for a decode worker that serves it alone."""
    own = {name: value for name, value in body.items() if not name.startswith("bootstrap_")}
    return own | {"local_prefill": True}


def check_num_samples(path: str, body: Body, limits: LimitsConfig) -> None:
    """Raise InvalidRequestError if the request has too many samples over all its prompts."""
    num_samples, _ = _count_samples(path, body)
    if num_samples > limits.max_samples:
        problem = f"the request has {num_samples} samples, and at most {limits.max_samples} are accepted"
        raise InvalidRequestError(
            f"{problem} (--max-samples): split it", param="sampling_params.n" if path == "/generate" else "n"
        )


def _count_samples(path: str, body: Body) -> tuple[int, bool]:
    """Return the number of samples, and whether they need a list of rooms."""
    if path != "/generate":
        return _times_n(body.get("prompt"), body)
    text, params = body.get("text"), body.get("sampling_params")
    prompts = text if is_batch(text) else body.get("input_ids")
    num_prompts = len(prompts) if is_batch(prompts) else 1
    if isinstance(params, list) and len(params) == num_prompts:
        return sum(_positive(p.get("n")) if isinstance(p, dict) else 1 for p in params), True
    return _times_n(prompts, params if isinstance(params, dict) else {})


def _times_n(prompts: object, sampling: Mapping[str, Any]) -> tuple[int, bool]:
    n = _positive(sampling.get("n"))
    return (len(prompts) * n, True) if is_batch(prompts) else (n, n > 1)


def _positive(n: object) -> int:
    return n if isinstance(n, int) and n > 0 else 1


def _with_seeds(params: object) -> object:
    """Return `sampling_params` of /generate with seeds: one object for all prompts, or a list with one per prompt."""
    if isinstance(params, list):
        return [_with_seeds(p) for p in params]
    return _with_seed(params or {}) if params is None or isinstance(params, dict) else params


def _with_seed(fields: Body) -> Body:
    return fields if _has_seed(fields) else {**fields, "seed": secrets.randbits(31)}


def _has_seed(fields: Body) -> bool:
    return fields.get("seed") is not None or fields.get("sampling_seed") is not None


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
    theirs = item.get("meta_info")
    if isinstance(theirs, dict):
        ours = _meta_of(prefill, item.get("index", position))
        for name in _META_FIELDS:
            if ours.get(name):
                theirs[name] = [*ours[name], *(theirs.get(name) or [])]
    for choice in _choices(item):
        _merge_choice(_choice_of(prefill, choice.get("index", 0)), choice)


def _meta_of(prefill: list[Any], index: object) -> dict[str, Any]:
    """Return the prefill's meta_info of one sample, from the last object that has prompt logprobs."""
    for position, item in reversed(list(enumerate(prefill))):
        if not isinstance(item, dict) or not isinstance(item.get("meta_info"), dict):
            continue
        if item.get("index", position) == index and item["meta_info"].get("input_token_logprobs"):
            return cast("dict[str, Any]", item["meta_info"])
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
