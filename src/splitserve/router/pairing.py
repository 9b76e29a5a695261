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

Pure: no connections, no clocks. Values of a wrong type pass through, because the workers reject them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from splitserve.api.responses import event_of
from splitserve.api.validation import is_batch
from splitserve.core.errors import UNREADABLE, InvalidRequestError
from splitserve.core.limits import LimitsConfig

T = TypeVar("T")

Body = dict[str, Any]
# JSON that is parsed in part: an object with the text of each field, and a list with that of each entry.
Fields = dict[str, Any]
Entries = list[msgspec.Raw]

_ANSWER = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_INDEX = msgspec.json.Decoder(int)
_DATA = b"data:"
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
    params = body.get("sampling_params") if path == "/generate" else body
    if isinstance(params, list) and len(params) == count_prompts(path, body):
        return sum(_positive(p.get("n")) if isinstance(p, dict) else 1 for p in params), True
    n = _positive(params.get("n")) if isinstance(params, dict) else 1
    return count_prompts(path, body) * n, n > 1 or is_batch(_prompts(path, body))


def count_prompts(path: str, body: Mapping[str, Any]) -> int:
    prompts = _prompts(path, body)
    return len(prompts) if is_batch(prompts) else 1


def _prompts(path: str, body: Mapping[str, Any]) -> object:
    """Return the prompts: a list of them, one prompt, or None for a chat."""
    text = body.get("text")
    return body.get("prompt") if path != "/generate" else text if is_batch(text) else body.get("input_ids")


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


class PromptLogprobs:
    """Prompt logprobs in a prefill's answer, by the index of their sample.

    They are copied as text: there can be 26 MB of them, which take a second to parse. `objects`: the answer's one
    object, its list's elements, or the events of its stream.
    """

    def __init__(self, objects: Iterable[Fields]) -> None:
        self._metas: dict[int, dict[str, Entries]] = {}
        self._choices: dict[int, dict[str, Entries]] = {}
        for position, item in enumerate(objects):
            meta = _lists(_fields(item.get("meta_info")), _META_FIELDS)
            if meta["input_token_logprobs"]:
                self._metas[_index(item, position)] = meta
            for choice in map(_fields, _entries(item.get("choices"))):
                if logprobs := _fields(choice.get("logprobs")):
                    self._choices.setdefault(_index(choice), _lists(logprobs, _CHOICE_FIELDS))

    def merge_answer(self, answer: bytes) -> bytes:
        """Return the decode's whole answer with the prompt's logprobs in it."""
        try:
            found = _ANSWER.decode(answer)
        except UNREADABLE:
            return answer
        if isinstance(found, dict):
            return msgspec.json.encode(self._merge(found))
        return msgspec.json.encode([self._merge(item, position) for position, item in enumerate(found)])

    def merge_event(self, event: bytes) -> bytes:
        """Return an event of the decode's stream with the prompt's logprobs in it."""
        fields = event_fields(event)
        return event_of(msgspec.json.encode(self._merge(fields))) if fields else event

    def _merge(self, item: Fields, position: int = 0) -> Fields:
        merged: dict[str, Any] = dict(item)
        if (meta := _fields(item.get("meta_info"))) and (ours := self._metas.get(_index(item, position))):
            lists = {name: mine + _entries(meta.get(name)) for name, mine in ours.items() if mine}
            merged["meta_info"] = {**meta, **lists}
        if choices := _entries(item.get("choices")):
            merged["choices"] = [self._merge_choice(_fields(choice)) for choice in choices]
        return merged

    def _merge_choice(self, choice: Fields) -> Fields:
        """Fill in the leading nulls: decode lists prompt tokens with null for values it has not computed."""
        ours, theirs = self._choices.get(_index(choice)), _fields(choice.get("logprobs"))
        if not ours or not theirs:
            return choice
        scores = _entries(theirs.get("token_logprobs"))
        unscored = next((i for i, score in enumerate(scores) if bytes(score) != b"null"), len(scores))
        lists = _lists(theirs, _CHOICE_FIELDS)
        filled = {name: ours[name][:unscored] + own[unscored:] for name, own in lists.items() if ours[name] and own}
        return {**choice, "logprobs": {**theirs, **filled}}


def answer_objects(answer: bytes) -> list[Fields]:
    """Return the object in an answer, or the elements of its list. Raises msgspec.DecodeError."""
    found = _ANSWER.decode(answer)
    return found if isinstance(found, list) else [found]


def event_fields(event: bytes) -> Fields:
    """Return the fields of the object in an event. Empty: [DONE], a comment, or no object."""
    return _fields(event[len(_DATA) :]) if event.startswith(_DATA) else {}


def _fields(value: msgspec.Raw | bytes | None) -> Fields:
    """Return the fields of an object. Empty: it is something else."""
    return _decoded(_OBJECT, value) or {}


def _lists(item: Fields, names: Iterable[str]) -> dict[str, Entries]:
    return {name: _entries(item.get(name)) for name in names}


def _entries(value: msgspec.Raw | None) -> Entries:
    """Return the entries of a list. Empty: it is something else."""
    return _decoded(_LIST, value) or []


def _index(item: Fields, default: int = 0) -> int:
    found = _decoded(_INDEX, item.get("index"))
    return default if found is None else found


def _decoded(decoder: msgspec.json.Decoder[T], value: msgspec.Raw | bytes | None) -> T | None:
    """Return a part of an answer. None: it is missing, or of another type."""
    try:
        return None if value is None else decoder.decode(value)
    except UNREADABLE:
        return None
