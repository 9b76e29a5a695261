from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import InvalidRequestError
from splitserve.core.limits import LimitsConfig
from splitserve.router.pairing import check_num_samples, random_room, with_identity, with_rooms


def paired(path: str, body: dict[str, Any]) -> dict[str, Any]:
    rooms = itertools.count(7)
    return with_rooms(path, with_identity(path, body), "10.0.0.1", 8998, lambda: next(rooms))


def test_a_single_prompt_gets_one_room_and_scalars() -> None:
    body = paired("/generate", {"text": "hi"})
    assert (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"]) == ("10.0.0.1", 8998, 7)


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"text": ["a"]}, 1),
        ("/generate", {"input_ids": [[1], [2]]}, 2),
        ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"n": 3}}, 6),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, 2),
        ("/v1/chat/completions", {"messages": [], "n": 4}, 4),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2}, 4),
    ],
)
def test_batches_and_several_samples_get_a_room_each(path: str, body: dict[str, Any], count: int) -> None:
    result = paired(path, body)
    assert result["bootstrap_room"] == list(range(7, 7 + count))
    assert result["bootstrap_host"] == ["10.0.0.1"] * count
    assert result["bootstrap_port"] == [8998] * count


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": "text", "n": 1}),
        ("/v1/chat/completions", {"messages": [], "n": None}),
        ("/v1/chat/completions", {"messages": [], "n": "many"}),
    ],
)
def test_one_sample_gets_scalars(path: str, body: dict[str, Any]) -> None:
    assert paired(path, body)["bootstrap_room"] == 7


def test_a_seed_is_drawn_where_none_is_given_and_kept_where_one_is() -> None:
    assert isinstance(paired("/generate", {"text": "a"})["sampling_params"]["seed"], int)
    assert paired("/generate", {"text": "a", "sampling_params": {"seed": 5}})["sampling_params"]["seed"] == 5
    assert "seed" not in paired("/generate", {"text": "a", "sampling_params": {"sampling_seed": 5}})["sampling_params"]
    seeds = paired("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"seed": 1}]})["sampling_params"]
    assert isinstance(seeds[0]["seed"], int)
    assert seeds[1]["seed"] == 1
    assert isinstance(paired("/v1/completions", {"prompt": "a"})["seed"], int)
    assert paired("/v1/completions", {"prompt": "a", "seed": 9})["seed"] == 9


@pytest.mark.parametrize(
    ("path", "body", "has_drawn"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}, True),
        ("/v1/completions", {"prompt": ["a", "b"], "seed": 9}, False),
        ("/generate", {"text": ["a", "b"]}, True),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"temperature": 1.0}}, True),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"sampling_seed": 5}}, False),
        # Each has its own seed already.
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"seed": 1}]}, False),
    ],
)
def test_a_seed_that_is_drawn_for_a_batch_is_marked(path: str, body: dict[str, Any], has_drawn: bool) -> None:
    assert with_identity(path, body)["dispatch"] == {"has_drawn_seed": has_drawn}


def test_the_request_id_is_given_once_and_the_clients_own_is_kept() -> None:
    assert len(paired("/generate", {"text": "a"})["rid"]) == 32
    assert paired("/generate", {"text": "a", "rid": "mine"})["rid"] == "mine"


def test_a_room_from_the_client_is_replaced() -> None:
    assert paired("/generate", {"text": "a", "bootstrap_room": 1})["bootstrap_room"] == 7


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["a"] * 2500, "sampling_params": {"n": 2}}),
        ("/generate", {"input_ids": [[1]] * 2, "sampling_params": [{"n": 4999}, {}]}),
        ("/v1/completions", {"prompt": [[1], [2]], "n": 2500}),
        ("/v1/chat/completions", {"messages": [], "n": 5000}),
    ],
)
def test_the_option_alone_limits_the_samples(path: str, body: dict[str, Any]) -> None:
    check_num_samples(path, body, LimitsConfig(max_samples=5000))
    assert len(paired(path, body)["bootstrap_room"]) == 5000
    with pytest.raises(InvalidRequestError, match="5000 samples, and at most 4999"):
        check_num_samples(path, body, LimitsConfig(max_samples=4999))


def test_rooms_are_63_bit() -> None:
    assert all(0 <= random_room() < 1 << 63 for _ in range(1000))


SCALAR = st.sampled_from([None, True, -1, 0, 3, "", "text", 1.5])
JSON = SCALAR | st.lists(SCALAR | st.lists(SCALAR, max_size=2), max_size=3)


@given(
    st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(st.sampled_from(["text", "input_ids", "prompt", "n", "sampling_params", "seed", "other"]), JSON),
)
def test_any_json_is_paired_and_what_the_client_sent_stays(path: str, body: dict[str, Any]) -> None:
    before = dict(body)
    result = paired(path, body)
    assert body == before
    for key in body.keys() - {"sampling_params", "seed"}:
        assert result[key] == body[key]
    fields = [result[f"bootstrap_{name}"] for name in ("host", "port", "room")]
    assert len({len(f) if isinstance(f, list) else -1 for f in fields}) == 1
