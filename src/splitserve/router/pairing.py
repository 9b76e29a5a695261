"""Conversion of one client request into the requests for the two workers of a pair.

Both workers get the same body. It is the client's, plus
- `bootstrap_host`, `bootstrap_port`, `bootstrap_room`: address and room of the rendezvous. Lists of equal length for a
  batch and for n > 1: one room per sample;
- `data_parallel_rank`, if the policy chose a rank of the prefill worker;
- `rid`, if the client gave none, so that an abort by id reaches both;
- a seed, if the client gave none, so that both workers sample the same tokens.

Pure: a dictionary in, a dictionary out. Values of a wrong type pass through, because the workers reject them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from splitserve.api.validation import is_batch
from splitserve.core.errors import InvalidRequestError
from splitserve.core.limits import LimitsConfig

Body = dict[str, Any]


def random_room() -> int:
    """Return a random room in [0, 2^63). Two requests share one with a probability of 2^-63."""
    return secrets.randbits(63)


def random_seed() -> int:
    return secrets.randbits(31)


def pair_body(path: str, body: Body, host: str, port: int | None, room: Callable[[], int] = random_room) -> Body:
    """Return the body for both workers. The client's own dictionary is not changed."""
    return with_rooms(path, with_identity(path, body), host, port, room)


def with_identity(path: str, body: Body) -> Body:
    """Return the client's body with the values that must be equal in every attempt: its id and its seeds."""
    own = dict(body)
    if own.get("rid") is None:
        own["rid"] = secrets.token_hex(16)
    if path == "/generate":
        own["sampling_params"] = _with_seeds(body.get("sampling_params"))
        return own
    return _with_seed(own)


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
        raise InvalidRequestError(f"{problem} (--max-samples): split it", param="n")


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
    if params is None:
        return {"seed": random_seed()}
    return _with_seed(params) if isinstance(params, dict) else params


def _with_seed(fields: Body) -> Body:
    if fields.get("seed") is not None or fields.get("sampling_seed") is not None:
        return fields
    return {**fields, "seed": random_seed()}
