"""The planner against a naive copy: a whole cache cut one way, carried over, compared with it cut the other way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.layout import KVComponent, KVLayout
from splitserve.transfer.convert import pack, unpack
from splitserve.transfer.copies import num_bytes
from splitserve.transfer.pairing import check_compatible, sources_of
from splitserve.transfer.reshard import RoomPages, plan, plan_unpack
from support.kv_world import layout

from .reshard_world import Cache, Cut, Kind, chunks_of, cuts, empty_pools, models, naive, pages_of, run

CANARY = 0xA5


@st.composite
def worlds(draw, dtypes=(("float32", "float32"),)):
    kinds, num_tokens = draw(models()), draw(st.integers(1, 90))
    src_dtype, dst_dtype = draw(st.sampled_from(dtypes))
    cache = Cache(kinds, num_tokens, src_dtype, draw(st.integers(0, 2**32 - 1)))
    return cache, draw(cuts(kinds, num_tokens, src_dtype)), draw(cuts(kinds, num_tokens, dst_dtype))


class Carried:
    """One target rank, fed by all its sources, and what it must hold in the end."""

    def __init__(self, data, cache, source_ranks, target, tp_rank, tp_size, wire_dtype=None):
        self.data, self.cache, self.target, self.wire_dtype = data, cache, target, wire_dtype
        self.pages = pages_of(data.draw, target, cache.num_tokens)
        self.pools = empty_pools(target, CANARY)
        self.counts = [np.zeros(len(p), np.uint8) for p in self.pools]
        self.feeds = sources_of(target, [rank for _, rank in source_ranks], tp_rank=tp_rank, tp_size=tp_size)
        for index, pairs in self.feeds.items():
            source = source_ranks[index][1]
            pages = pages_of(data.draw, source, cache.num_tokens)
            pools = empty_pools(source, 0x5A)
            cache.place(source, pools, pages)
            self.carry(source, pools, pages, pairs)

    def carry(self, source, pools, pages, pairs):
        num_tokens = self.cache.num_tokens
        options = {"wire_dtype": self.wire_dtype, "pack_below": self.data.draw(st.sampled_from([0, 10**9]))}
        for tokens in chunks_of(self.data.draw, num_tokens, source.page_size):
            sent = pages[: -(-tokens.stop // source.page_size)]
            copies, casts = plan(
                source, self.target, RoomPages(sent), RoomPages(self.pages), tokens, num_tokens, pairs, **options
            )
            run(copies, pools, self.pools, self.counts)
            for cast in casts:
                for part in cast.split(self.data.draw(st.sampled_from([256, 4096, 2**20]))):
                    staging = np.zeros(64 + part.num_bytes, np.uint8)
                    pack(part, pools, staging[64:])
                    run(part.writes(0, 64), [staging], self.pools, self.counts)

    def check(self):
        for pool, count, expected, is_read in self._naive(self.cache):
            assert (count == is_read).all()
            assert (pool == np.where(is_read, expected, CANARY)).all()

    def check_widened(self, rounded):
        """What will be read is right, and nothing outside the room's pages was touched."""
        is_outside = np.ones(self.target.num_pages, bool)
        is_outside[self.pages] = False
        for pool, count, expected, is_read in self._naive(rounded):
            assert count.max() <= 1
            assert (pool[is_read] == expected[is_read]).all()
            # No byte of the narrower dtype is left where a slot of the pool's might be read as NaN.
            assert np.isin(pool[~is_read], [CANARY, 0]).all()
            assert (pool.reshape(self.target.num_pages, -1)[is_outside] == CANARY).all()

    def _naive(self, cache):
        """(pool, writes of each byte, naive copy, bytes that it wrote): those that are so whatever was there before."""
        copied = naive(cache, self.target, self.pages)
        return [(p, n, *c) for p, n, c in zip(self.pools, self.counts, copied, strict=True)]


def carry_all(data, world):
    cache, src, dst = world
    source_ranks = src.ranks(cache.kinds)
    for tp_rank, target in dst.ranks(cache.kinds):
        Carried(data, cache, source_ranks, target, tp_rank, dst.tp).check()


@settings(deadline=None, max_examples=100)
@given(st.data(), worlds())
def test_every_target_rank_holds_its_cut_of_the_cache_and_each_byte_was_written_once(data, world):
    carry_all(data, world)


@settings(deadline=None, max_examples=50)
@given(
    st.data(),
    worlds([("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float32", "float8_e4m3fn")]),
)
def test_rows_are_cast_to_the_targets_dtype_on_the_way(data, world):
    carry_all(data, world)


@settings(deadline=None, max_examples=50)
@given(
    st.data(),
    worlds([("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]),
    st.sampled_from(["float8_e4m3fn", "bfloat16"]),
)
def test_a_room_that_travels_in_a_narrower_dtype_is_widened_inside_its_pages(data, world, wire_dtype):
    cache, src, dst = world
    source_ranks = src.ranks(cache.kinds)
    for tp_rank, target in dst.ranks(cache.kinds):
        arrived = Carried(data, cache, source_ranks, target, tp_rank, dst.tp, wire_dtype=wire_dtype)
        for cast in plan_unpack(
            target, RoomPages(arrived.pages), range(cache.num_tokens), cache.num_tokens, wire_dtype
        ):
            unpack(cast, arrived.pools)
        rounded = Cache(cache.kinds, cache.num_tokens, "float32", 0)
        limit = 448 if wire_dtype == "float8_e4m3fn" else np.inf
        wide = {k: v.astype(np.float32).clip(-limit, limit) for k, v in cache.values.items()}
        rounded.values = {k: v.astype(wire_dtype) for k, v in wide.items()}
        arrived.check_widened(rounded)


# -- sources of a rank --------------------------------------------------------------------------------------------


def side(tp, *, heads=4, name="k", layers=4, stages=1):
    kinds = [Kind(name, n, heads, 4) for n in range(layers)]
    size = layers // stages
    cut = Cut(tp, tuple(tuple(range(i, i + size)) for i in range(0, layers, size)), 16, 8, "NHD", "float32")
    return cut.ranks(kinds)


def feeds_of(sources, targets, tp):
    """For each target rank, rows of a token that each source gives it."""
    layouts = [rank for _, rank in sources]
    return [
        {i: sum(p.num_heads for p in pairs) for i, pairs in sources_of(t, layouts, tp_rank=r, tp_size=tp).items()}
        for r, t in targets
    ]


def test_equal_ranks_feed_each_other_one_to_one():
    assert feeds_of(side(4), side(4), 4) == [{0: 4}, {1: 4}, {2: 4}, {3: 4}]


def test_fewer_or_more_target_ranks_take_from_those_that_hold_their_heads():
    assert feeds_of(side(4), side(2), 2) == [{0: 4, 1: 4}, {2: 4, 3: 4}]
    assert feeds_of(side(2), side(4), 4) == [{0: 4}, {0: 4}, {1: 4}, {1: 4}]


def test_sources_that_hold_the_same_heads_share_the_load_evenly():
    # Two KV heads on eight ranks: four hold each. No rank sends twice, and none is idle.
    assert feeds_of(side(8, heads=2), side(2, heads=2), 2) == [{0: 1, 1: 1, 2: 1, 3: 1}, {4: 1, 5: 1, 6: 1, 7: 1}]
    assert feeds_of(side(8, heads=2), side(4, heads=2), 4) == [{0: 2, 1: 2}, {2: 2, 3: 2}, {4: 2, 5: 2}, {6: 2, 7: 2}]
    assert feeds_of(side(4, heads=2), side(8, heads=2), 8) == [{n // 2: 4} for n in range(8)]


def test_a_latent_is_written_by_one_source_and_the_sources_take_turns():
    latent = {"heads": 1, "name": "latent"}
    assert feeds_of(side(4, **latent), side(4, **latent), 4) == [{0: 4}, {1: 4}, {2: 4}, {3: 4}]
    assert feeds_of(side(1, **latent), side(4, **latent), 4) == [{0: 4}] * 4
    assert feeds_of(side(4, **latent), side(1, **latent), 1) == [{0: 1, 1: 1, 2: 1, 3: 1}]


def test_pipeline_stages_feed_the_layers_they_hold():
    assert feeds_of(side(1, stages=4), side(1, stages=2), 1) == [{0: 4, 1: 4}, {2: 4, 3: 4}]
    assert feeds_of(side(2, stages=1), side(1, stages=2), 1) == [{0: 4, 1: 4}] * 2


def test_heads_or_layers_that_no_source_holds_are_refused():
    (_, whole), halves = side(1)[0], [rank for _, rank in side(2)]
    with pytest.raises(ValueError, match=r"head 2 of layer 0 \(k\) is held by no source: they hold \[0, 1\]"):
        sources_of(whole, halves[:1])
    with pytest.raises(ValueError, match=r"head 0 of layer 2 \(k\) is held by no source: they hold none"):
        sources_of(whole, [rank for _, rank in side(1, stages=2)][:1])
    with pytest.raises(ValueError, match="layout of source 1: head size of layer 0"):
        sources_of(whole, [whole, replace(whole, components=(replace(whole.components[0], head_dim=8),))])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"head_dim": 8}, "head size of layer 0 (k) 2 against 8"),
        ({"total_heads": 2}, "KV heads in all of layer 0 (k) 1 against 2"),
        ({"window": 16}, "sliding window of layer 0 (k) None against 16"),
    ],
)
def test_layouts_that_do_not_fit_are_named(other, words):
    ours = layout()
    theirs = replace(ours, components=(replace(ours.components[0], **other), *ours.components[1:]))
    assert words in check_compatible(ours, theirs)
    with pytest.raises(ValueError, match="layouts differ"):
        plan(ours, theirs, RoomPages([]), RoomPages([]), range(0), 0)


def test_an_unknown_dtype_is_rejected():
    with pytest.raises(ValueError, match="KV dtype 'int8' is unknown: use one of float32, bfloat16"):
        replace(layout().components[0], dtype="int8")


def test_neither_sixteen_bit_dtype_is_converted_to_the_other():
    assert "float16 against bfloat16" in check_compatible(layout(dtype="float16"), layout(dtype="bfloat16"))


def test_pools_may_differ_in_size_page_size_axes_and_layers():
    ours = layout(10, layers=4)
    other = layout(1000, page_size=8, layers=2)
    assert check_compatible(ours, other) is None
    hnd = replace(other, components=tuple(replace(c, axes="HND") for c in other.components))
    assert check_compatible(ours, hnd) is None


# -- shape of a plan ----------------------------------------------------------------------------------------------


def pool(heads, *, first=0, total=8, axes="NHD", page_size=16, dtype="float16", layers=30):
    components = tuple(
        KVComponent(name, n, dtype, heads, first, total, 64, axes=axes) for n in range(layers) for name in "kv"
    )
    return KVLayout(page_size, 128, components)


def whole_room(src, dst, **options):
    pages = list(range(128))
    return plan(src, dst, RoomPages(pages), RoomPages(pages[::-1]), range(2048), 2048, **options)


def test_equal_layouts_take_one_copy_for_each_page_of_each_component():
    copies, casts = whole_room(pool(8), pool(8))
    assert (len(copies), casts) == (60 * 128, [])
    assert set(copies["length"].tolist()) == {16 * 8 * 64 * 2}


def test_runs_contiguous_on_both_sides_are_one_copy_whatever_the_page_sizes():
    src = layout(layers=1)
    copies = plan(src, src, RoomPages([1, 2, 3, 7, 8]), RoomPages([11, 12, 13, 14, 16]), range(20), 20).copies
    size = src.components[0].page_bytes(src.page_size)
    assert (copies["length"] // size).tolist() == [3, 1, 1] * 2
    assert (
        len(plan(src, layout(page_size=12, layers=1), RoomPages([3, 4, 5]), RoomPages([1]), range(12), 12).copies) == 2
    )


def test_half_the_heads_travel_token_by_token_in_nhd_and_page_by_page_in_hnd():
    assert len(whole_room(pool(8), pool(4)).copies) == 60 * 2048
    assert len(whole_room(pool(8, axes="HND"), pool(4, axes="HND")).copies) == 60 * 128


def test_packing_turns_small_pieces_into_pages_of_the_target():
    copies, casts = whole_room(pool(8), pool(4), pack_below=4096)
    assert len(copies) == 0
    assert sum(len(cast.writes(0, 0)) for cast in casts) == 60 * 128
    assert sum(cast.num_bytes for cast in casts) == num_bytes(whole_room(pool(8), pool(4)).copies)


def test_packing_is_not_done_where_the_target_itself_is_in_pieces():
    assert whole_room(pool(4), pool(8), pack_below=4096).casts == []


def test_layers_of_one_geometry_are_planned_once():
    casts = whole_room(pool(8, dtype="float32"), pool(8)).casts
    assert [len(cast.regions) for cast in casts] == [60]


def test_parts_of_a_cast_fit_the_memory_they_are_packed_in():
    (cast,) = whole_room(pool(8, dtype="float32"), pool(8)).casts
    parts = list(cast.split(100_000))
    assert max(part.num_bytes for part in parts) <= 100_000
    assert sum(part.num_bytes for part in parts) == cast.num_bytes
    with pytest.raises(ValueError, match="row of 1024 bytes does not fit into 1000 bytes"):
        next(cast.split(1000))


def test_what_float8_and_float16_cannot_hold_saturates():
    src, dst = layout(1, page_size=1, layers=1), layout(1, page_size=1, layers=1, dtype="float8_e4m3fn")
    pools = [np.array([1e9, -3.14], np.float32).view(np.uint8), np.array([np.nan, -449], np.float32).view(np.uint8)]
    (cast,) = plan(src, dst, RoomPages([0]), RoomPages([0]), range(1), 1).casts
    out = np.zeros(cast.num_bytes, np.uint8)
    pack(cast, pools, out)
    np.testing.assert_array_equal(out.view("float8_e4m3fn").astype(float), [448, -3.25, np.nan, -448])


@pytest.mark.parametrize(
    ("src_pages", "dst_pages", "tokens", "words"),
    [
        ([0], [0, 1], range(5), "1 source pages of 4 tokens do not hold 5"),
        ([0, 1], [0], range(4, 5), "1 target pages of 4 tokens do not hold 5"),
        ([64], [0], range(4), "source pages reach outside the pool of 64"),
        ([0], [-1], range(4), "target pages reach outside"),
        ([0], [0], range(9), "not a range of the room's 8"),
    ],
)
def test_pages_and_tokens_that_do_not_fit_are_refused(src_pages, dst_pages, tokens, words):
    with pytest.raises(ValueError, match=words):
        plan(layout(), layout(), RoomPages(src_pages), RoomPages(dst_pages), tokens, 8)
