"""All layers in one call of C against the same layers one by one: equal to the last bit, whatever the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from splitserve.engine.attention.base import ATTENTION_NAME, PagedBatch, register_attention
from splitserve.engine.attention.kernels import KernelBackend
from splitserve.engine.kernels import stack as stack_module
from splitserve.engine.kernels.decoder import PlainDecoder
from splitserve.engine.kernels.library import find_library
from splitserve.engine.kernels.stack import DecoderStack
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import probe
from support.kernel_layers import use_kernels

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=16),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "hybrid": transformers.Qwen3Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
PAGE_SIZE, NUM_REQUESTS, PAGES_EACH = 4, 9, 12


class World:
    """A model with kernels over a pool, in which each request has a prompt already."""

    def __init__(self, name: str, *, has_window_pages: bool = False) -> None:
        torch.manual_seed(0)
        register_attention()
        self.model = transformers.AutoModelForCausalLM.from_config(
            CONFIGS[name], dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        ).eval()
        shapes = probe(self.model, name)
        library = find_library()
        assert library is not None
        use_kernels(self.model, shapes, library)
        (stack,) = self.model.base_model.layers
        assert isinstance(stack, DecoderStack)
        self.stack = stack
        decoder = PlainDecoder.of(self.model)
        assert decoder is not None
        self.decoder = decoder
        layout = layout_for(shapes, "bfloat16", page_size=PAGE_SIZE, num_pages=NUM_REQUESTS * PAGES_EACH)
        self.has_window_pages = has_window_pages
        if has_window_pages:
            layout = replace(layout, num_window_pages=layout.num_pages)
        self.backend = KernelBackend(KVPool(layout, torch.device("cpu")), library)
        self.lengths = [3 + 4 * i for i in range(NUM_REQUESTS)]
        self.step(range(NUM_REQUESTS), [0] * NUM_REQUESTS, self.lengths)

    def step(
        self,
        requests: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        output_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens that follow from their request and position; or of some rows."""
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        pages = tuple(r * PAGES_EACH + np.arange(-(-end // PAGE_SIZE)) for r, end in zip(requests, ends, strict=True))
        # In the other order, wherever the pools' numbers differ.
        windows = tuple(NUM_REQUESTS * PAGES_EACH - 1 - p for p in pages) if self.has_window_pages else None
        rows = None if output_rows is None else np.array(output_rows)
        batch = PagedBatch(np.array(starts), np.array(lengths), pages, PAGE_SIZE, windows, rows)
        owners = np.repeat(np.array(requests), batch.lengths)
        with torch.inference_mode():
            hidden = self.decoder.body(
                torch.from_numpy((7 * owners + 3 * batch.positions) % 101)[None],
                torch.from_numpy(batch.positions)[None],
                self.backend.plan(batch),
            )
        # The next step overwrites it.
        return hidden.clone()

    def decode(self, requests: Sequence[int]) -> torch.Tensor:
        return self.step(requests, [self.lengths[r] for r in requests], [1] * len(requests))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each program had that was run."""
    library = find_library()
    assert library is not None
    run, counts = library.run_program, []

    def counting(program: Any) -> None:
        counts.append(program._obj.num_calls)
        run(program)

    monkeypatch.setattr(library, "run_program", counting)
    return counts


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_single_tokens_is_one_call_and_equals_its_layers_one_by_one(
    name: str, threads: int, programs: list[int]
) -> None:
    world = World(name)
    # Growing, shrinking, and in another order: memory and arguments of the step before are used again.
    batches = [(0,), (3, 1), tuple(range(NUM_REQUESTS)), (8, 2, 5), (4,)]
    found = [world.decode(batch) for batch in batches]
    # And the norm behind the layers.
    assert programs[1:] == [10 * SHAPE["num_hidden_layers"] + 1] * len(batches)
    world.model.base_model.layers = world.stack.layers
    for batch, states in zip(batches, found, strict=True):
        assert torch.equal(states, world.decode(batch))
    assert len(programs) == 1 + len(batches)


def test_window_pages_are_found_in_one_call_too(programs: list[int]) -> None:
    one_pool, own_pool = World("hybrid"), World("hybrid", has_window_pages=True)
    for batch in ((0,), (8, 2, 5), tuple(range(NUM_REQUESTS))):
        assert torch.equal(own_pool.decode(batch), one_pool.decode(batch))
    assert len(programs) == 8


def test_what_a_request_gets_does_not_depend_on_its_company(threads: int) -> None:
    world = World("llama")
    together = world.decode(range(NUM_REQUESTS))
    for request in range(NUM_REQUESTS):
        assert torch.equal(world.decode([request])[0], together[request])


def test_new_keys_and_values_lie_where_the_layers_one_by_one_put_them() -> None:
    world = World("qwen3")
    pools = [*world.backend.pool.keys.values(), *world.backend.pool.values.values()]
    prompts_only = [pool.clone() for pool in pools]
    world.decode((0, 6))
    found = [pool.clone() for pool in pools]
    for pool, before in zip(pools, prompts_only, strict=True):
        pool.copy_(before)
    world.model.base_model.layers = world.stack.layers
    world.decode((0, 6))
    assert not any(torch.equal(pool, before) for pool, before in zip(pools, prompts_only, strict=True))
    assert all(torch.equal(pool, states) for pool, states in zip(pools, found, strict=True))


# Requests, tokens before the step and new tokens: decode steps and prompts, alone and together.
MIXED_STEPS = (
    ((0, 1), (3, 0), (1, 5)),
    ((4,), (0,), (40,)),
    ((2, 5, 8, 3), (11, 4, 35, 0), (1, 30, 1, 37)),
    ((6, 7), (0, 20), (25, 20)),
    ((8, 0), (35, 3), (1, 1)),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_with_prompts_is_one_call_and_equals_its_layers_one_by_one(
    name: str, threads: int, programs: list[int]
) -> None:
    world = World(name)
    programs.clear()
    found = [world.step(*step) for step in MIXED_STEPS]
    # One call of attention for all requests with few new tokens, and one per prompt.
    num_layers = SHAPE["num_hidden_layers"]
    assert programs == [num_layers * (9 + count) + 1 for count in (1, 1, 3, 2, 1)]
    world.model.base_model.layers = world.stack.layers
    for step, states in zip(MIXED_STEPS, found, strict=True):
        assert torch.equal(states, world.step(*step))
    assert len(programs) == len(MIXED_STEPS)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_layer_computes_only_the_rows_that_are_used(name: str, threads: int, programs: list[int]) -> None:
    world = World(name, has_window_pages=name == "hybrid")
    pools = [*world.backend.pool.keys.values(), *world.backend.pool.values.values()]
    for (requests, starts, lengths), rows in zip(
        MIXED_STEPS, ((5,), (39,), (0, 30, 31, 68), (24, 44), (1,)), strict=True
    ):
        everything = world.step(requests, starts, lengths)
        before = [pool.clone() for pool in pools]
        programs.clear()
        assert torch.equal(world.step(requests, starts, lengths, rows), everything[list(rows)])
        assert all(torch.equal(pool, states) for pool, states in zip(pools, before, strict=True))
        assert len(programs) == 1


def test_large_buffers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("llama")
    (large,) = world.stack._kept
    monkeypatch.setattr(stack_module, "_KEPT_BYTES", large.num_bytes - 1)
    world.decode((1, 2))
    assert world.stack._kept == []
    world.decode((1, 2))
    assert len(world.stack._kept) == 1


def test_another_number_of_threads_is_followed(programs: list[int]) -> None:
    world = World("llama")
    before = world.decode((1, 2))
    torch.set_num_threads(2)
    try:
        assert torch.equal(before, world.decode((1, 2)))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(before, world.decode((1, 2)))
