"""Whole hand-overs between workers of any two shapes: real managers on every rank, a fake network, real memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.errors import IncompatiblePeerError
from splitserve.core.parallel import ParallelRank
from splitserve.transfer.peers import feeds_of
from splitserve.transfer.state import KVPoll
from splitserve.transfer.wire import KVArgs
from support.kv_groups import GroupWorld, RankLayouts

from .reshard_world import Cache, Cut, Kind, chunks_of, cuts, models, naive, pages_of

CANARY = 0xA5


def shape_of(cut, kinds):
    return RankLayouts([layout for _, layout in cut.ranks(kinds)], cut.tp)


def cut_of(kinds, tp=1, pp=1, page_size=4, dtype="float32", axes="NHD"):
    layers = sorted({k.layer for k in kinds})
    bounds = [len(layers) * n // pp for n in range(pp + 1)]
    stages = tuple(tuple(layers[a:b]) for a, b in pairwise(bounds))
    return Cut(tp, stages, page_size, 64, axes, dtype)


def heads(n, layers=4):
    return [Kind(name, layer, n, 2) for layer in range(layers) for name in "kv"]


LATENT = [Kind("latent", layer, 1, 6) for layer in range(4)]


class Counted:
    """How often each byte of a decode rank's pool was written."""

    def __init__(self, worker):
        self.worker = worker
        self.counts = [np.zeros(pages.size, np.uint8) for pages in worker.pages]
        self.rows = 0
        self._land = worker.transport.land
        worker.transport.land = self.land
        for pages in worker.pages:
            pages[:] = CANARY

    def land(self, source, copy):
        _, _, region, offset, length = copy.tolist()[0]
        if region < len(self.counts):
            self.counts[region][offset : offset + length] += 1
        else:
            self.rows += 1
        self._land(source, copy)


def build(source, target, kinds, **options):
    world = GroupWorld(shape_of(source, kinds), shape_of(target, kinds), **options)
    return world, [Counted(worker) for worker in world.decode.workers]


def fill(world, cache, pages):
    for worker in world.prefill.workers:
        cache.place(worker.layout, [p.reshape(-1) for p in worker.pages], pages)


def hand_over(world, cache, src_pages, dst_pages, chunks, num_held_tokens=0):
    """Both ends of room 1 after everything has been sent. `chunks`: of tokens."""
    fill(world, cache, src_pages)
    world.set_row(1, index=3, token=77)
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    receiver.init(dst_pages, 5, num_tokens=cache.num_tokens, num_held_tokens=num_held_tokens)
    world.tick()
    page_size = world.prefill.driver.layout.page_size
    for tokens in chunks:
        assert sender.poll() in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING), sender.failure()
        is_last = tokens.stop == cache.num_tokens
        pages = src_pages[tokens.start // page_size : -(-tokens.stop // page_size)]
        sender.send(pages, is_last=is_last, metadata_index=3 if is_last else None)
        world.tick(3)
    world.tick(20)
    return sender, receiver


def check(world, counted, cache, dst_pages, num_held_tokens=0):
    """Every rank of decode holds its cut, and each byte of it was written once."""
    num_bytes = 0
    for ours in counted:
        for i, (expected, is_read) in enumerate(naive(cache, ours.worker.layout, dst_pages, num_held_tokens)):
            assert (ours.counts[i] == is_read).all()
            assert (ours.worker.pages[i].reshape(-1) == np.where(is_read, expected, CANARY)).all()
            num_bytes += int(is_read.sum())
        assert ours.rows == (1 if ours.worker is world.decode.driver else 0)
    return num_bytes


def finish(world, sender, receiver):
    assert sender.quiescent()
    assert receiver.quiescent()
    sender.clear()
    receiver.clear()
    world.tick()
    assert world.prefill.num_rooms() == world.decode.num_rooms() == 0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_two_shapes_hand_over_each_byte_once_to_the_right_place(data):
    kinds, num_tokens = data.draw(models()), data.draw(st.integers(1, 40))
    source, target = (data.draw(cuts(kinds, num_tokens, "float32")) for _ in range(2))
    cache = Cache(kinds, num_tokens, "float32", data.draw(st.integers(0, 2**32 - 1)))
    options = {"wants_checksum": data.draw(st.booleans())}
    world, counted = build(source, target, kinds, prefill_options=options)
    src, dst = (pages_of(data.draw, group.driver.layout, num_tokens) for group in (world.prefill, world.decode))
    held = target.page_size * data.draw(st.integers(0, num_tokens // target.page_size))
    chunks = chunks_of(data.draw, num_tokens, source.page_size)
    sender, receiver = hand_over(world, cache, src, dst, chunks, held)
    assert receiver.poll() is sender.poll() is KVPoll.SUCCESS
    num_bytes = check(world, counted, cache, dst, held)
    assert sender.stats().num_bytes == num_bytes + world.prefill.metadata.row_bytes
    assert world.decode.metadata.get_buf(5, receiver.key).output_id == 77
    finish(world, sender, receiver)


SHAPES = [
    # Heads, then tp x pp of prefill and of decode.
    (4, (1, 1), (2, 1)),
    (4, (2, 1), (1, 1)),
    (4, (4, 1), (2, 1)),
    (4, (2, 1), (4, 1)),
    (4, (1, 1), (4, 1)),
    (4, (1, 2), (1, 1)),
    (4, (1, 1), (1, 2)),
    (4, (1, 2), (1, 3)),
    (4, (2, 2), (1, 1)),
    (4, (2, 1), (1, 2)),
    (2, (4, 1), (1, 1)),
    (3, (3, 1), (6, 1)),
    (3, (1, 1), (3, 2)),
    (1, (2, 1), (4, 1)),
]


@pytest.mark.parametrize(("num_heads", "prefill", "decode"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_these_shapes_work_with_other_page_sizes_and_dtypes(num_heads, prefill, decode, dtype):
    kinds = heads(num_heads) + [Kind(f"draft_{n}", 0, num_heads, 2) for n in "kv"]
    source, target = cut_of(kinds, *prefill, page_size=3), cut_of(kinds, *decode, page_size=5, dtype=dtype)
    world, counted = build(source, target, kinds, prefill_options={"staging_slot_bytes": 4096})
    cache = Cache(kinds, 13, "float32", seed=1)
    ends = hand_over(world, cache, [7, 3, 9, 4, 1], [8, 2, 6], [range(6), range(6, 13)])
    assert [end.poll() for end in ends] == [KVPoll.SUCCESS] * 2
    check(world, counted, cache, [8, 2, 6])
    finish(world, *ends)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_latent_that_all_ranks_hold_travels_once_to_each_rank_of_decode(prefill, decode):
    world, counted = build(cut_of(LATENT, prefill), cut_of(LATENT, decode), LATENT)
    cache = Cache(LATENT, 10, "float32", seed=2)
    sender, receiver = hand_over(world, cache, [1, 2, 3], [4, 5, 6], [range(10)])
    assert sender.poll() is receiver.poll() is KVPoll.SUCCESS
    check(world, counted, cache, [4, 5, 6])
    assert sender.stats().num_bytes == decode * 4 * 10 * 6 * 4 + world.prefill.metadata.row_bytes


def with_draft(shape, draft):
    """Add a draft model's layers as workers do: shared by the ranks of a single stage, or all on the driver."""
    ranks = shape.ranks()
    driver = next(i for i, rank in enumerate(ranks) if rank.is_driver)
    total = draft[0].total_heads
    is_shared = ranks[0].pp_size == 1 and (total % shape.tp_size == 0 or shape.tp_size % total == 0)
    layers = tuple(sorted({kind.layer for kind in draft}))
    layouts = []
    for i, layout in enumerate(shape.layouts):
        cut = Cut(shape.tp_size if is_shared else 1, (layers,), layout.page_size, layout.num_pages, "NHD", "float32")
        held = () if not is_shared and i != driver else cut.ranks(draft)[i if is_shared else 0][1].components
        layouts.append(replace(layout, components=layout.components + held))
    return RankLayouts(layouts, shape.tp_size)


# Two draft layers, of heads that two ranks can share, or not.
@pytest.mark.parametrize("num_draft_heads", [2, 3])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, 1), (2, 1)),
        ((2, 1), (1, 1)),
        ((2, 1), (4, 1)),
        ((4, 1), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((1, 2), (1, 1)),
        ((1, 1), (1, 2)),
        ((2, 2), (2, 1)),
        ((1, 2), (2, 2)),
        ((1, 3), (1, 2)),
    ],
)
def test_a_draft_models_kv_travels_once_wherever_both_workers_have_it(prefill, decode, num_draft_heads):
    kinds = heads(4)
    draft = [Kind(f"draft_{n}", layer, num_draft_heads, 2) for layer in range(2) for n in "kv"]
    shapes = [
        with_draft(shape_of(cut_of(kinds, *cut, page_size=page_size), kinds), draft)
        for cut, page_size in ((prefill, 3), (decode, 5))
    ]
    world = GroupWorld(*shapes)
    counted = [Counted(worker) for worker in world.decode.workers]
    cache = Cache(kinds + draft, 13, "float32", seed=4)
    ends = hand_over(world, cache, [7, 3, 9, 4, 1], [8, 2, 6], [range(6), range(6, 13)])
    assert [end.poll() for end in ends] == [KVPoll.SUCCESS] * 2
    check(world, counted, cache, [8, 2, 6])
    finish(world, *ends)


# -- pairs of ranks -----------------------------------------------------------------------------------------------


def args_of(cut, kinds):
    shape = shape_of(cut, kinds)
    return [
        KVArgs(backend="fake", model="m", layout=a, metadata_row_bytes=64, num_metadata_rows=8, rank=r)
        for r, a in zip(shape.ranks(), shape.layouts, strict=True)
    ]


def all_feeds(kinds, prefill, decode):
    """For each rank of decode: {source: (its share of a token's rows, targets of that source)}."""
    sources, targets = args_of(cut_of(kinds, *prefill), kinds), args_of(cut_of(kinds, *decode), kinds)
    return [
        {f.source: (sum(p.num_heads for p in f.pairs), f.num_targets) for f in feeds_of(t, targets, sources)}
        for t in range(len(targets))
    ]


def test_equal_shapes_meet_one_to_one():
    assert all_feeds(heads(4), (1, 1), (1, 1)) == [{0: (32, 1)}]
    # The driver of two stages is rank 2: tensor parallel rank 0 of the last.
    assert all_feeds(heads(4), (2, 2), (2, 2)) == [{n: (8, 1)} for n in range(4)]


def test_the_decode_driver_hears_from_the_prefill_driver_though_it_takes_no_heads_from_it():
    # Prefill's last stage is its driver and feeds both halves of decode; the driver there is rank 0.
    assert all_feeds(heads(4), (1, 2), (1, 2)) == [{0: (16, 1)}, {1: (16, 1)}]
    assert all_feeds(heads(4), (1, 2), (2, 1)) == [{0: (8, 2), 1: (8, 2)}, {0: (8, 2), 1: (8, 2)}]
    assert all_feeds(heads(4, layers=3), (1, 3), (1, 1)) == [{0: (8, 1), 1: (8, 1), 2: (8, 1)}]
    # Stages of 1 + 2 layers against 2 + 1: the drivers have layer 2 in common, and the last of prefill feeds both.
    uneven = [[0], [1, 2]], [[0, 1], [2]]
    sources, targets = (args_of(replace(cut_of(heads(1, 3)), stages=tuple(map(tuple, s))), heads(1, 3)) for s in uneven)
    feeds = [{f.source: f.num_targets for f in feeds_of(t, targets, sources)} for t in range(2)]
    assert feeds == [{0: 1, 1: 2}, {1: 2}]


def test_a_prefill_rank_whose_heads_nobody_takes_is_told_by_the_decode_driver():
    # One layer: of four ranks with the same latent one is enough.
    one_layer = LATENT[:1]
    assert all_feeds(one_layer, (4, 1), (1, 1)) == [{0: (1, 1), 1: (0, 1), 2: (0, 1), 3: (0, 1)}]
    world, counted = build(cut_of(one_layer, 4), cut_of(one_layer), one_layer)
    cache = Cache(one_layer, 4, "float32", seed=3)
    sender, receiver = hand_over(world, cache, [1], [2], [range(4)])
    assert sender.poll() is receiver.poll() is KVPoll.SUCCESS
    check(world, counted, cache, [2])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_prefill_rank_is_announced_to_and_all_ranks_count_alike(data):
    kinds = data.draw(models())
    source, target = (args_of(data.draw(cuts(kinds, 8, "float32")), kinds) for _ in range(2))
    feeds = [feeds_of(t, target, source) for t in range(len(target))]
    told = [f.source for rank in feeds for f in rank]
    assert set(told) == set(range(len(source)))
    assert all(f.num_targets == told.count(f.source) for rank in feeds for f in rank)
    driver = next(i for i, t in enumerate(target) if t.rank.is_driver)
    assert next(i for i, s in enumerate(source) if s.rank.is_driver) in [f.source for f in feeds[driver]]


def test_shapes_that_do_not_fit_are_refused_with_both():
    kinds = heads(4)
    # A prefill worker without half of the layers of its last stage.
    short = replace(cut_of(kinds, 2, 2), stages=((0, 1), (2,)))
    world = GroupWorld(shape_of(short, kinds), shape_of(cut_of(kinds, 1, 2), kinds))
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    words = (
        "prefill of tensor parallel size 2 x pipeline parallel size 2 cannot feed decode of tensor parallel size 1 x "
        "pipeline parallel size 2: head 0 of layer 3 (k) is held by no source"
    )
    assert words in receiver.failure().message
    assert receiver.failure().reason == IncompatiblePeerError.reason
    assert words in sender.failure().message
    assert receiver.quiescent()


def test_pages_change_owner_between_single_ranks_only():
    args = args_of(cut_of(heads(4), 2), heads(4))[0]
    shared = KVArgs(**{f: getattr(args, f) for f in args.__struct_fields__} | {"shared_pool": "p"})
    assert "one rank only: tp 0 of 2, pp 0 of 1 against" in shared.difference(shared, ())


def test_the_name_of_a_rank_says_where_it_is():
    assert ParallelRank(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2).name == "tp 1 of 4, pp 1 of 2"
