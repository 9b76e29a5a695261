"""Checks and parameters of a prompt, for all routes, before it becomes samples; and the rooms of the samples.

A room list with one entry per sample gives every sample its own room. With one entry per prompt, or one for all,
samples share a room and are distinguished by their index: over the n of the prompt, or over the whole request. Both
workers of a pair get the same body, so their indexes agree. `data_parallel_rank` is the prefill's rank; without it the
room determines the rank.

A request to a decode worker with `local_prefill` and without a room has no prefill worker.
"""

from __future__ import annotations

from typing import Any

from splitserve.api import validation
from splitserve.api.samples import PromptSpec, random_seed
from splitserve.api.schemas import GenerationFields, SamplingFields
from splitserve.core.errors import InvalidRequestError, MissingBootstrapError
from splitserve.core.grammar import GrammarSpec
from splitserve.core.parallel import MAX_DP_SIZE
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.server.front_end import FrontEnd


def prompt_spec(
    front: FrontEnd,
    token_ids: list[int],
    fields: SamplingFields,
    grammar: GrammarSpec | None,
    *,
    name: str,
    num_logprobs: int | None,
    top_name: str,
    logprob_start: int = -1,
) -> PromptSpec:
    """Return the spec of a prompt.

    `num_logprobs`: alternatives per token. None: no logprobs. `logprob_start`: first prompt position to score. -1:
    none. `name`, `top_name`: names of the prompt and of the number of alternatives in errors.
    """
    info = front.info
    limit = info.max_total_tokens_per_request
    validation.check_prompt(token_ids, name=name, vocab_size=info.vocab_size, limit=limit)
    validation.check_top_logprobs(num_logprobs or 0, top_name)
    start = validation.logprob_start(logprob_start, len(token_ids))
    room = limit - len(token_ids)
    return PromptSpec(
        token_ids,
        validation.sampling_params(
            fields, default_seed=random_seed(), grammar=grammar, room=room, vocab_size=info.vocab_size
        ),
        return_logprob=num_logprobs is not None,
        num_top_logprobs=num_logprobs or 0,
        # Only the worker that computes the prompt can score it.
        logprob_start=None if front.mode is DisaggregationMode.DECODE else start,
    )


def bootstrap_infos(
    fields: GenerationFields,
    *,
    mode: DisaggregationMode,
    num_prompts: int,
    n: int,
    own_host: str,
    own_port: int,
    own_dp_size: int = 1,
) -> list[BootstrapInfo | None]:
    """Return one BootstrapInfo per sample, prompt by prompt. None: the sample has no peer.

    Raises MissingBootstrapError if a worker of a pair gets no room.
    """
    num_samples = num_prompts * n
    if mode is DisaggregationMode.NULL:
        return [None] * num_samples
    if mode is DisaggregationMode.DECODE and fields.bootstrap_room is None and fields.local_prefill:
        return [None] * num_samples
    if fields.bootstrap_room is None:
        remedy = ", or say local_prefill" if mode is DisaggregationMode.DECODE else ""
        raise MissingBootstrapError(
            f"this is a {mode} worker and the request names no bootstrap_room: send it to the router, which pairs "
            f"it{remedy}",
            param="bootstrap_room",
        )
    keys = _room_keys(fields.bootstrap_room, num_prompts, n)
    # The prefill worker itself is the rendezvous.
    default_host = own_host if mode is DisaggregationMode.PREFILL else None
    hosts = [_host(h, default_host) for h in _per_sample(fields.bootstrap_host, num_prompts, n, "bootstrap_host")]
    ports = [_port(p, own_port) for p in _per_sample(fields.bootstrap_port, num_prompts, n, "bootstrap_port")]
    # Only prefill knows its number of ranks.
    dp_size = own_dp_size if mode is DisaggregationMode.PREFILL else MAX_DP_SIZE
    given = _per_sample(fields.data_parallel_rank, num_prompts, n, "data_parallel_rank")
    ranks = [_dp_rank(rank, dp_size) for rank in given]
    return [BootstrapInfo(*info) for info in zip(hosts, ports, keys, ranks, strict=True)]


def _room_keys(rooms: Any, num_prompts: int, n: int) -> list[RoomKey]:
    samples = range(num_prompts * n)
    if not isinstance(rooms, list):
        return [RoomKey(_room(rooms), i) for i in samples]
    spread = _per_sample(rooms, num_prompts, n, "bootstrap_room")
    shared = len(rooms) < len(samples)
    return [RoomKey(_room(spread[i]), i % n if shared else 0) for i in samples]


def _per_sample(value: Any, num_prompts: int, n: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * (num_prompts * n)
    if len(value) == num_prompts * n:
        return value
    if len(value) == num_prompts:
        return [v for v in value for _ in range(n)]
    raise InvalidRequestError(
        f"{name} is a list of {len(value)}: give one, one a prompt ({num_prompts}) or one a sample ({num_prompts * n})",
        param=name,
    )


def _room(room: Any) -> int:
    if room is None:
        raise MissingBootstrapError("bootstrap_room holds null: every sample needs a room", param="bootstrap_room")
    if not _is_int(room) or not 0 <= room < 1 << 63:
        raise InvalidRequestError(f"bootstrap_room {room!r}: must be an integer in [0, 2^63)", param="bootstrap_room")
    return int(room)


def _host(host: Any, default: str | None) -> str:
    host = default if host is None else host
    if host is None:
        raise MissingBootstrapError(
            "a decode worker must be told the prefill's bootstrap_host: send the request to the router",
            param="bootstrap_host",
        )
    if not isinstance(host, str) or not host:
        raise InvalidRequestError(f"bootstrap_host {host!r}: must be a host name or address", param="bootstrap_host")
    return host


def _port(port: Any, default: int) -> int:
    if port is None:
        return default
    if not _is_int(port) or not 0 < port < 1 << 16:
        raise InvalidRequestError(f"bootstrap_port {port!r}: must be in [1, 65535] or null", param="bootstrap_port")
    return int(port)


def _dp_rank(rank: Any, dp_size: int) -> int | None:
    if rank is not None and (not _is_int(rank) or not 0 <= rank < dp_size):
        raise InvalidRequestError(
            f"data_parallel_rank {rank!r}: must be in [0, {dp_size}) or null, which leaves it to the room",
            param="data_parallel_rank",
        )
    return None if rank is None else int(rank)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
