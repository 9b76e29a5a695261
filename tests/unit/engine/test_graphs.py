"""Replayed decode steps against plain ones. What records is a function that runs everything anew: there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.batch import RequestStep, SampleSpec, StepPlan
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.attention.base import PagedBatch
from splitserve.engine.attention.flashinfer import FlashInferBackend
from splitserve.engine.graphs import DecodeGraphs, bucket_for, bucket_sizes, padded
from splitserve.engine.loader import LoadedModel
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.runner import ModelRunner
from support import fake_flashinfer
from support.tiny_models import TinyKind

GREEDY = ResolvedSampling(temperature=0.0)
PAGE_SIZE = 4
NUM_PAGES = 32


@given(largest=st.integers(0, 600), asked=st.integers(1, 700))
def test_the_smallest_recorded_size_that_holds_a_step_is_taken(largest: int, asked: int) -> None:
    sizes = bucket_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    found = bucket_for(asked, sizes)
    if asked > largest:
        assert found is None
    else:
        assert found is not None
        assert asked <= found <= min(largest, 2 * asked - 1)


def test_the_largest_size_is_the_one_asked_for() -> None:
    assert bucket_sizes(0) == ()
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(256)[-2:] == (128, 256)


def test_padding_adds_requests_of_one_token_on_the_padding_page() -> None:
    batch = PagedBatch(np.array([5]), np.array([1]), (np.array([2, 7]),), 4)
    whole = padded(batch, 3, 99)
    assert whole.starts.tolist() == [5, 0, 0]
    assert whole.lengths.tolist() == [1, 1, 1]
    assert [pages.tolist() for pages in whole.pages] == [[2, 7], [99], [99]]


class EagerRecorder:
    """Runs everything anew, into the tensor that the recording returned."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        out = compute().clone()

        def replay() -> None:
            self.num_replays += 1
            out.copy_(compute())

        return replay, out


class World:
    """A pool with a padding page, and two runners over pools of their own: one replays, the other does not."""

    def __init__(self, loaded: LoadedModel, sizes: tuple[int, ...]) -> None:
        layout = layout_for(loaded.layers, loaded.dtype_name, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        self.table = np.arange(NUM_PAGES, dtype=np.int32).reshape(4, 8)
        self.pools = [KVPool(layout, loaded.device, has_padding_page=True) for _ in range(2)]
        backends = [FlashInferBackend(pool, fake_flashinfer) for pool in self.pools]
        self.plain, self.replaying = (ModelRunner(loaded, b, PAGE_SIZE, self.table) for b in backends)
        self.recorder = EagerRecorder()
        with torch.inference_mode():
            self.replaying.graphs = DecodeGraphs(
                loaded.model,
                backends[1],
                self.recorder,
                sizes=sizes,
                max_pages=self.table.shape[1],
                page_size=PAGE_SIZE,
                padding_page=NUM_PAGES,
                device=loaded.device,
            )

    def run(self, steps: list[RequestStep]) -> list[int | None]:
        """Both runners do it, and agree."""
        plan = StepPlan(tuple(steps))
        expected, found = self.plain.execute(plan), self.replaying.execute(plan)
        assert [r.token_id for r in found.requests] == [r.token_id for r in expected.requests]
        for ours, theirs in zip(found.requests, expected.requests, strict=True):
            states = [np.frombuffer(b"".join(result.hidden_states), np.float32) for result in (ours, theirs)]
            np.testing.assert_allclose(*states, rtol=1e-4, atol=1e-3)
        return [r.token_id for r in found.requests]


def step(row: int, tokens: list[int], start: int) -> RequestStep:
    spec = SampleSpec(GREEDY, start + len(tokens), tokens, (), return_hidden_state=True)
    return RequestStep(f"r{row}", row, tokens, start, spec)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_replayed_decode_gives_the_tokens_and_the_cache_of_a_plain_one(
    kind: TinyKind, tiny_model: Callable[[TinyKind], LoadedModel]
) -> None:
    world = World(tiny_model(kind), (1, 2, 4))
    prompts = [[3, 4, 5], [7], [9, 10, 11, 12, 13]]
    lengths = [len(p) for p in prompts]
    tokens = world.run([step(row, prompt, 0) for row, prompt in enumerate(prompts)])
    assert world.recorder.num_replays == 0
    # Requests come and go: every bucket is used, with and without padding.
    for rows in ([0, 1, 2], [0, 1, 2], [0, 2], [2], [0, 1, 2], [1]):
        drawn = world.run([step(row, [int(tokens[row] or 0)], lengths[row]) for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
            lengths[row] += 1
    assert world.recorder.num_replays == 6
    for one, two in zip(world.pools[0].keys.values(), world.pools[1].keys.values(), strict=True):
        # Padded, a matrix product rounds elsewhere.
        torch.testing.assert_close(two[:NUM_PAGES], one[:NUM_PAGES], atol=1e-3, rtol=1e-4)
        assert two[NUM_PAGES].any()


def test_larger_and_mixed_steps_are_left_to_the_plain_way(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    world = World(tiny_model("llama"), (1, 2))
    world.run([step(row, [5 + row], 0) for row in range(3)])
    world.run([step(0, [1], 1), step(1, [2, 3], 1)])
    assert world.recorder.num_replays == 0
    world.run([step(0, [1], 2)])
    assert world.recorder.num_replays == 1


def test_a_warm_up_leaves_every_page_but_the_padding_page_alone(
    tiny_model: Callable[[TinyKind], LoadedModel],
) -> None:
    world = World(tiny_model("llama"), (1,))
    world.plain.warm_up(NUM_PAGES)
    for tensor in (*world.pools[0].keys.values(), *world.pools[0].values.values()):
        assert not tensor[:NUM_PAGES].any()
        assert tensor[NUM_PAGES].any()


def test_regions_end_before_the_padding_page(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    pool = World(tiny_model("llama"), (1,)).pools[0]
    for region, component in zip(pool.regions(), pool.layout.components, strict=True):
        assert region.length == NUM_PAGES * component.page_bytes(PAGE_SIZE)
    for tensor in pool.keys.values():
        assert len(tensor) == NUM_PAGES + 1
