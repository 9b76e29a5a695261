"""Arguments of FlashInfer for a step, the pools that it can serve, and the backend chosen if it is missing."""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ConfigError
from splitserve.engine.attention import choice
from splitserve.engine.attention.base import AttentionParams, PagedBatch
from splitserve.engine.attention.choice import choose_attention, find_flashinfer
from splitserve.engine.attention.flashinfer import FlashInferBackend, page_lists, problem_with
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend, new_slots
from splitserve.engine.loader import LoadedModel
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LayerShape
from support import fake_flashinfer

CPU = torch.device("cpu")


def pool_of(dtype: str = "bfloat16", k_dim: int = 64, v_dim: int = 64) -> KVPool:
    return KVPool(layout_for([LayerShape(0, 2, k_dim, v_dim, None)], dtype, page_size=4, num_pages=8), CPU)


def latents_of(dtype: str = "bfloat16", row: int = 576, window: int | None = None) -> KVPool:
    return KVPool(layout_for([LayerShape(0, 1, row, 512, window, True)], dtype, page_size=4, num_pages=8), CPU)


@st.composite
def batches(draw: st.DrawFn) -> PagedBatch:
    page_size = draw(st.integers(1, 17))
    spans = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32))).permutation(1000).tolist()
    pages = []
    for start, length in spans:
        pages.append(np.array([numbers.pop() for _ in range(-(-(start + length) // page_size))]))
    starts, lengths = (np.array(column) for column in zip(*spans, strict=True))
    return PagedBatch(starts, lengths, tuple(pages), page_size)


@given(batch=batches(), window=st.none() | st.integers(1, 40))
def test_page_lists_lead_to_every_token_that_is_seen(batch: PagedBatch, window: int | None) -> None:
    lists = page_lists(batch, window)
    found = []
    for r, length in enumerate(batch.lengths.tolist()):
        pages = lists.pages[lists.page_begins[r] : lists.page_begins[r + 1]]
        num_tokens = (len(pages) - 1) * batch.page_size + int(lists.last_page_tokens[r])
        left_out = int(batch.starts[r]) + length - num_tokens
        first_seen = 0 if window is None else max(0, int(batch.starts[r]) - window + 1)
        assert left_out == first_seen // batch.page_size * batch.page_size
        slots = (pages[:, None] * batch.page_size + np.arange(batch.page_size)).reshape(-1)[:num_tokens]
        assert lists.query_begins[r + 1] - lists.query_begins[r] == length
        # New tokens are a request's last.
        found.append(slots[num_tokens - length :])
    assert np.array_equal(np.concatenate(found), new_slots(batch, batch.pages))
    assert (lists.last_page_tokens >= 1).all()


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (pool_of(), None),
        (pool_of("float16", 128, 128), None),
        (pool_of("float32"), "float32"),
        (pool_of(k_dim=80, v_dim=80), "heads of 64, 128, 256, and the model's have 80"),
        (pool_of(k_dim=128, v_dim=64), "of one size"),
        (latents_of(), None),
        (latents_of("float32"), "float32"),
        (latents_of(row=320), "rows of 576, and the model's have 320"),
        (latents_of(window=64), "no windows"),
    ],
)
def test_a_pool_that_the_kernels_cannot_serve_is_named(pool: KVPool, says: str | None) -> None:
    problem = problem_with(pool)
    assert (problem is None) if says is None else (problem is not None and says in problem)


def test_layers_that_ask_for_the_same_are_planned_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    plan = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan

    def count(self: Any, *args: Any, **options: Any) -> None:
        plans.append(options["window_left"])
        plan(self, *args, **options)

    monkeypatch.setattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "plan", count)
    pool = pool_of()
    step = FlashInferBackend(pool, fake_flashinfer).plan(PagedBatch(np.array([0]), np.array([1]), (np.array([3]),), 4))
    for window in (None, 5, None, 5):
        states = (torch.randn(1, heads, 64).bfloat16() for heads in (4, 2, 2))
        step.forward(0, *states, AttentionParams(0.1, window))
    # The library's window leaves out the token itself.
    assert plans == [-1, 4]


@pytest.mark.parametrize(
    ("lengths", "wrapper", "splits"),
    [
        ((1, 1), "BatchDecodeWithPagedKVCacheWrapper", "512 pages"),
        ((1, 3), "BatchPrefillWithPagedKVCacheWrapper", "none"),
    ],
)
def test_in_fixed_order_keys_are_summed_in_pieces_of_one_size_or_in_one(
    lengths: tuple[int, int], wrapper: str, splits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(fake_flashinfer, wrapper, recorded(getattr(fake_flashinfer, wrapper), made))
    backend = FlashInferBackend(pool_of(), fake_flashinfer, in_fixed_order=True)
    pages = (np.array([3]), np.array([5]))
    step = backend.plan(PagedBatch(np.array([0, 0]), np.array(lengths), pages, 4))
    step.forward(
        0, *(torch.randn(sum(lengths), heads, 64).bfloat16() for heads in (2, 2, 2)), AttentionParams(0.1, None)
    )
    (found,) = made
    assert found.splits == splits
    assert getattr(found, "backend", "fa2") == "fa2"


def recorded(kind: Any, made: list[Any]) -> Any:
    def make(*args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    return make


class _Loaded:
    """The arguments of `choose_attention`."""

    name = "tiny"
    dtype = torch.float32
    kernels = None

    class model:
        class config:
            @staticmethod
            def get_text_config() -> Any:
                return type("Text", (), {"num_attention_heads": 4})


class _OnGpu:
    """A pool's face without its memory."""

    device = torch.device("cuda:0")
    layout = pool_of().layout


LOADED = cast("LoadedModel", _Loaded())


def test_flashinfer_by_name_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="is for GPUs"):
        choose_attention("flashinfer", LOADED, pool_of())


def test_on_a_cpu_it_is_never_asked_for() -> None:
    assert isinstance(choose_attention("auto", LOADED, pool_of()), TorchSdpaBackend)
    assert isinstance(choose_attention("torch", LOADED, pool_of()), TorchSdpaBackend)


def test_flashinfer_by_name_that_is_absent_names_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    library, problem = find_flashinfer()
    assert library is None
    assert problem is not None
    assert "pip install 'splitserve[cuda]'" in problem
    with pytest.raises(ConfigError, match=r"splitserve\[cuda\]"):
        choose_attention("flashinfer", LOADED, cast("KVPool", _OnGpu()))


def test_latents_are_computed_by_torch_unless_flashinfer_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "find_flashinfer", lambda: (fake_flashinfer, None))
    monkeypatch.setattr(choice, "FlashInferBackend", lambda pool, library, **_: library)
    pool = latents_of()
    pool.device = torch.device("cuda:0")
    assert isinstance(choose_attention("auto", LOADED, pool), TorchSdpaBackend)
    assert "--attention-backend flashinfer" in caplog.text
    chosen: Any = choose_attention("flashinfer", LOADED, pool)
    assert chosen is fake_flashinfer
