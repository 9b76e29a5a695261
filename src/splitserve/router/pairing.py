"""What turns one client request into the two halves of a pair.

Both halves get the same body. It is the client's, plus
- `bootstrap_host`, `bootstrap_port`, `bootstrap_room`: where and under which number the two sides meet. Lists of equal
  length for a batch and for n > 1: one room a sample;
- `data_parallel_rank`, where the policy chose one of a prefill worker's;
- `rid`, where the client gave none, so that an abort by id reaches both;
- a seed, where the client gave none, so that both sides draw the same tokens.

Pure: a dictionary in, a dictionary out. Values that have the wrong type pass through: the workers refuse them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from splitserve.errors import InvalidRequestError

Body = dict[str, Any]

# Samples one request may ask for at most, over all its prompts.
MAX_SAMPLES = 4096


def draw_room() -> int:
    """A number in [0, 2^63) that no request shares but by a chance of 2^-63 a pair."""
    return secrets.randbits(63)


def draw_seed() -> int:
    return secrets.randbits(31)


def pair_body(path: str, body: Body, host: str, port: int | None, room: Callable[[], int] = draw_room) -> Body:
    """The body both workers get. The client's own dictionary stays as it is. Raises InvalidRequestError: too many."""
    return with_rooms(path, with_identity(path, body), host, port, room)


def with_identity(path: str, body: Body) -> Body:
    """The client's body with what must be the same in every try of the request: its id and its seeds."""
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
    room: Callable[[], int] = draw_room,
    *,
    prefill_rank: int | None = None,
) -> Body:
    """The body with the meeting point of a pair. Raises InvalidRequestError: too many samples.

    `prefill_rank`: data parallel rank of the prefill worker, unless the client named one.
    """
    is_native = path == "/generate"
    num_samples, is_list = count_native_samples(body) if is_native else count_openai_samples(body)
    if num_samples > MAX_SAMPLES:
        raise InvalidRequestError(f"{num_samples} samples in one request: {MAX_SAMPLES} at most, split it", param="n")
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
    """The body for a decode worker that is to serve it alone."""
    own = {name: value for name, value in body.items() if not name.startswith("bootstrap_")}
    return own | {"local_prefill": True}


def count_native_samples(body: Body) -> tuple[int, bool]:
    """Samples of a /generate body, and whether it is answered by a list."""
    prompts, is_batch = 1, False
    text, input_ids = body.get("text"), body.get("input_ids")
    if isinstance(text, list):
        prompts, is_batch = len(text), True
    elif isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], list):
        prompts, is_batch = len(input_ids), True
    params = body.get("sampling_params")
    if isinstance(params, list) and len(params) == prompts:
        total = sum(_positive(p.get("n")) if isinstance(p, dict) else 1 for p in params)
        return total, True
    n = _positive(params.get("n")) if isinstance(params, dict) else 1
    return prompts * n, is_batch or n > 1


def count_openai_samples(body: Body) -> tuple[int, bool]:
    """Samples of a chat or completion body, and whether they need a list of rooms."""
    prompt, n = body.get("prompt"), _positive(body.get("n"))
    is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = len(prompt) if is_batch and isinstance(prompt, list) else 1
    return prompts * n, is_batch or n > 1


def _positive(n: object) -> int:
    return n if isinstance(n, int) and n > 0 else 1


def _with_seeds(params: object) -> object:
    """`sampling_params` of /generate: one object for all prompts, a list with one a prompt, or nothing."""
    if isinstance(params, list):
        return [_with_seeds(p) for p in params]
    if params is None:
        return {"seed": draw_seed()}
    return _with_seed(params) if isinstance(params, dict) else params


def _with_seed(fields: Body) -> Body:
    if fields.get("seed") is not None or fields.get("sampling_seed") is not None:
        return fields
    return {**fields, "seed": draw_seed()}
