from __future__ import annotations

from typing import Any

import pytest

from splitserve.api.samples import fan_out
from splitserve.api.schemas import Dispatch, GenerationFields, JournalEntry
from splitserve.core.errors import InvalidRequestError, MissingBootstrapError, OtherModelError
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling, sample_seed
from splitserve.server.generate_route import bootstrap_infos

SPEC = GenerateRequest(rid="", prompt_ids=[1, 2], params=ResolvedSampling(seed=5))


def infos(
    mode: str = "decode",
    num_prompts: int = 2,
    n: int = 2,
    data_parallel_rank: Any = None,
    local_prefill: bool | None = None,
    **fields: Any,
) -> list[Any]:
    given = {"bootstrap_host": "h", **{f"bootstrap_{k}": v for k, v in fields.items()}}
    return bootstrap_infos(
        GenerationFields(**given, data_parallel_rank=data_parallel_rank, local_prefill=local_prefill),
        mode=DisaggregationMode(mode),
        num_prompts=num_prompts,
        n=n,
        own_host="own",
        own_port=8998,
        own_dp_size=2,
    )


def test_one_sample_keeps_the_clients_id_and_seed() -> None:
    (sample,) = fan_out([SPEC], 1, "r", [None]).samples
    assert (sample.request.rid, sample.request.params.seed) == ("r", 5)


def test_samples_are_numbered_over_the_whole_request() -> None:
    fanout = fan_out([SPEC, SPEC], 2, "r", [None] * 4)
    assert [s.request.rid for s in fanout.samples] == ["r-0", "r-1", "r-2", "r-3"]
    assert [s.prompt_index for s in fanout.samples] == [0, 0, 1, 1]
    assert fanout.names == {"r": ("r-0", "r-1", "r-2", "r-3")}


def test_a_list_of_ids_names_one_prompt_each() -> None:
    fanout = fan_out([SPEC, SPEC], 2, ["a", "b"], [None] * 4)
    assert fanout.names == {"a": ("a-0", "a-1"), "b": ("b-0", "b-1")}
    assert fan_out([SPEC, SPEC], 1, ["a", "b"], [None] * 2).names == {"a": ("a",), "b": ("b",)}


def test_the_samples_of_a_prompt_draw_with_different_seeds_derived_from_one() -> None:
    seeds = [s.request.params.seed for s in fan_out([SPEC, SPEC], 3, "r", [None] * 6).samples]
    assert seeds == [sample_seed(5, k) for k in (0, 1, 2)] * 2
    assert len(set(seeds)) == 3


def test_prompts_of_a_batch_draw_with_different_seeds_if_the_client_gave_none() -> None:
    """A router draws one seed for the body, so that each attempt has the same."""
    drawn = Dispatch(has_drawn_seed=True)
    seeds = [s.request.params.seed for s in fan_out([SPEC] * 3, 3, "r", [None] * 9, dispatch=drawn).samples]
    assert len(set(seeds)) == 9
    assert seeds[:3] == [sample_seed(5, k) for k in (0, 1, 2)]
    assert seeds == [s.request.params.seed for s in fan_out([SPEC] * 3, 3, "r", [None] * 9, dispatch=drawn).samples]


@pytest.mark.parametrize(
    ("room", "keys"),
    [
        ([10, 11, 12, 13], [(10, 0), (11, 0), (12, 0), (13, 0)]),
        ([10, 11], [(10, 0), (10, 1), (11, 0), (11, 1)]),
        (7, [(7, 0), (7, 1), (7, 2), (7, 3)]),
    ],
)
def test_every_sample_has_its_own_key_however_rooms_are_given(room: Any, keys: list[tuple[int, int]]) -> None:
    assert [i.key for i in infos(room=room)] == [RoomKey(*k) for k in keys]


def test_a_batch_without_n_may_have_one_room_a_prompt() -> None:
    assert [i.key for i in infos(n=1, room=[3, 3 << 50])] == [RoomKey(3), RoomKey(3 << 50)]


def test_hosts_and_ports_may_be_lists_and_a_null_port_is_this_workers_own() -> None:
    found = infos(room=1, host=["a", "b"], port=[1, None])
    assert [(i.host, i.port) for i in found] == [("a", 1), ("a", 1), ("b", 8998), ("b", 8998)]


def test_a_prefill_worker_is_its_own_bootstrap_host() -> None:
    (info,) = infos("prefill", 1, 1, room=1, host=None)
    assert info.host == "own"


def test_a_colocated_worker_ignores_the_fields() -> None:
    assert infos("null", room="nonsense", port="x") == [None] * 4


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_worker_of_a_pair_needs_a_room(mode: str) -> None:
    with pytest.raises(MissingBootstrapError, match="names no bootstrap_room"):
        infos(mode)
    with pytest.raises(MissingBootstrapError, match="names no bootstrap_room"):
        infos(mode, local_prefill=False)


def test_a_decode_worker_needs_none_where_it_is_to_compute_the_prompt_itself() -> None:
    assert infos("decode", local_prefill=True) == [None] * 4
    # A room has priority, because a peer waits for it.
    assert [info.key.room for info in infos("decode", local_prefill=True, room=4)] == [4] * 4
    with pytest.raises(MissingBootstrapError, match="names no bootstrap_room"):
        infos("prefill", local_prefill=True)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"room": [1, 2, 3]}, "list of 3"),
        ({"room": []}, "list of 0"),
        ({"room": -1}, r"\[0, 2\^63\)"),
        ({"room": 1 << 63}, r"\[0, 2\^63\)"),
        ({"room": "7"}, "must be an integer"),
        ({"room": True}, "must be an integer"),
        ({"room": 1.5}, "must be an integer"),
        ({"room": [[3], [3]]}, "must be an integer"),
        ({"room": [1, None]}, "every sample needs a room"),
        ({"room": 1, "port": 0}, "bootstrap_port"),
        ({"room": 1, "port": "1"}, "bootstrap_port"),
        ({"room": 1, "host": 5}, "bootstrap_host"),
        ({"room": 1, "host": ["h"] * 3}, "list of 3"),
        ({"room": 1, "host": None}, "must be told"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        infos(**fields)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_both_sides_find_the_same_rank_by_the_room_or_by_the_request(mode: str) -> None:
    assert [info.prefill_rank(2) for info in infos(mode, room=[4, 5, 6, 7])] == [0, 1, 0, 1]
    assert [info.prefill_rank(2) for info in infos(mode, room=[4, 5, 6, 7], data_parallel_rank=1)] == [1] * 4
    assert [info.prefill_rank(2) for info in infos(mode, room=[4, 5], data_parallel_rank=[0, None])] == [0, 0, 1, 1]


@pytest.mark.parametrize("rank", [2, -1, "1", True])
def test_a_rank_that_prefill_does_not_have_is_refused(rank: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 2\)"):
        infos("prefill", room=4, data_parallel_rank=rank)


def test_a_stream_goes_on_with_the_weights_of_its_beginning_only() -> None:
    lines = [JournalEntry(0, [1], model="a"), JournalEntry(0, [2])]
    past = Dispatch(attempt=1, told=lines)
    # Of a worker that did not name its weights.
    unknown = Dispatch(attempt=1, told=[JournalEntry(0, [1])])
    for model, dispatch in (("a", past), ("", past), ("b", unknown)):
        (sample,) = fan_out([SPEC], 1, "r", [None], None, dispatch, 9, model).samples
        assert sample.request.output_ids
    with pytest.raises(OtherModelError, match="began with other weights"):
        fan_out([SPEC], 1, "r", [None], None, past, 9, "b")
