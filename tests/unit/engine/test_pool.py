"""The pool's memory follows its layout, and its size follows the settings."""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import replace
from typing import cast

import numpy as np
import psutil
import pytest
import torch

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.config import CacheConfig
from splitserve.core.errors import ConfigError
from splitserve.core.machine import Arena, Sharing
from splitserve.engine.build import _is_shareable
from splitserve.engine.pool import KVPool, _arena, layout_for, num_pages_for
from splitserve.engine.probe import LayerShape

CPU = torch.device("cpu")
SHAPES = (LayerShape(0, 2, 8, 4, None), LayerShape(1, 2, 8, 4, 32))


def bytes_at(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


def test_components_are_keys_then_values_layer_by_layer() -> None:
    layout = layout_for(SHAPES, "float32", page_size=4, num_pages=3)
    assert [(c.name, c.layer, c.head_dim) for c in layout.components] == [
        ("k", 0, 8),
        ("v", 0, 4),
        ("k", 1, 8),
        ("v", 1, 4),
    ]
    assert layout.bytes_per_token == 2 * 2 * (8 + 4) * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_region_i_is_component_i_and_page_p_lies_at_p_pages(dtype: str) -> None:
    layout = layout_for(SHAPES, dtype, page_size=4, num_pages=3)
    pool = KVPool(layout, CPU)
    tensors = [pool.keys[0], pool.values[0], pool.keys[1], pool.values[1]]
    for tensor, component, region in zip(tensors, layout.components, pool.regions(), strict=True):
        assert tensor.shape == (3, 4, 2, component.head_dim)
        tensor[1] = torch.randn(tensor.shape[1:])
        page_bytes = component.page_bytes(4)
        assert region.length == 3 * page_bytes
        expected = tensor[1].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes_at(region.address + page_bytes, page_bytes) == expected


def test_saved_pages_come_back_into_others_whatever_became_of_theirs() -> None:
    layout = layout_for(SHAPES, "bfloat16", page_size=4, num_pages=6)
    pool = KVPool(layout, CPU)
    tensors = [pool.keys[0], pool.values[0], pool.keys[1], pool.values[1]]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    copy = pool.save([4, 1, 2])
    assert sum(part.nbytes for part in copy.parts) == 3 * pool.bytes_per_page
    for tensor in tensors:
        tensor.zero_()
    pool.restore(copy, 1, [0, 5])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[0, 5]], old[[1, 2]])
        assert not tensor[[1, 2, 3, 4]].any()


def test_layers_with_windows_can_have_a_pool_of_their_own_whose_pages_are_saved_with_those_they_belong_to() -> None:
    shapes = [LayerShape(0, 2, 8, 8, None), LayerShape(1, 1, 4, 4, 20)]
    layout = replace(layout_for(shapes, "float32", page_size=4, num_pages=6), num_window_pages=3)
    pool = KVPool(layout, CPU)
    assert [len(pool.keys[layer]) for layer in (0, 1)] == [6, 3]
    assert [region.length for region in pool.regions()] == [6 * 4 * 64, 6 * 4 * 64, 3 * 4 * 16, 3 * 4 * 16]
    pool.window_table = np.array([-1, 2, -1, 0, 1, -1], np.int32)
    for tensor in (pool.keys[0], pool.values[0], pool.keys[1], pool.values[1]):
        tensor.copy_(torch.randn(tensor.shape))
    full, windowed = pool.keys[0].clone(), pool.values[1].clone()
    copy = pool.save([2, 1, 3])
    assert pool.bytes_of([2, 1, 3]) == sum(part.nbytes for part in (*copy.parts, *copy.window_parts))
    assert pool.bytes_of([2, 1, 3]) == 3 * 4 * 128 + 2 * 4 * 32
    # Of pages 1 and 3 window pages were saved; page 5 has none now, page 4 has.
    pool.restore(copy, 1, [5, 4])
    assert torch.equal(pool.keys[0][[5, 4]], full[[1, 3]])
    assert torch.equal(pool.values[1], windowed[[0, 0, 2]])


def test_regions_do_not_overlap() -> None:
    regions = sorted(
        KVPool(layout_for(SHAPES, "float32", page_size=4, num_pages=3), CPU).regions(), key=lambda r: r.address
    )
    for one, two in itertools.pairwise(regions):
        assert one.address + one.length <= two.address


def test_memory_nobody_wrote_to_is_zero_and_costs_nothing() -> None:
    before = psutil.Process().memory_info().rss
    layout = layout_for(SHAPES, "float32", page_size=16, num_pages=200_000)
    pool = KVPool(layout, CPU)
    assert layout.num_pages * layout.bytes_per_page > 500 * 2**20
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    assert not pool.keys[1][199_999].any()


def test_close_can_be_repeated_and_gives_the_regions_back() -> None:
    pool = KVPool(layout_for(SHAPES, "float32", page_size=4, num_pages=3), CPU)
    pool.close()
    pool.close()
    assert pool.regions() == ()


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (4096, 256)])
def test_a_number_of_tokens_is_rounded_up_to_pages(tokens: int, pages: int) -> None:
    one_page = layout_for(SHAPES, "float32", page_size=16, num_pages=1)
    assert num_pages_for(one_page, CacheConfig(max_total_tokens=tokens), CPU) == pages


def test_a_fraction_of_free_memory_is_not_exceeded() -> None:
    one_page = layout_for(SHAPES, "float32", page_size=16, num_pages=1)
    pages = num_pages_for(one_page, CacheConfig(mem_fraction=0.01), CPU)
    assert 0 < pages * one_page.bytes_per_page <= 0.01 * psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("device", "fraction", "workers", "share"),
    [
        ("cpu", None, 1, 0.15),
        ("cpu", None, 2, 0.15),
        ("cuda", None, 1, 0.85),
        ("cuda", None, 2, 0.425),
        ("cuda", 0.5, 2, 0.5),
    ],
)
def test_without_a_fraction_a_gpu_gives_most_of_what_is_free_and_a_cpu_little(
    device: str, fraction: float | None, workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page = layout_for(SHAPES, "float32", page_size=16, num_pages=1)
    monkeypatch.setattr("splitserve.engine.pool._free_memory", lambda _: 1000 * one_page.bytes_per_page)
    pages = num_pages_for(one_page, CacheConfig(mem_fraction=fraction, workers_per_gpu=workers), torch.device(device))
    assert pages == int(1000 * share)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (CacheConfig(mem_fraction=1e-12), "Raise mem_fraction"),
        (CacheConfig(mem_fraction=0.0), "mem_fraction is 0.0"),
        (CacheConfig(max_total_tokens=0), "max_total_tokens is 0"),
    ],
)
def test_a_pool_without_a_page_is_refused_with_the_remedy(cache: CacheConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        num_pages_for(layout_for(SHAPES, "float32", page_size=16, num_pages=1), cache, CPU)


def test_a_shareable_pool_lies_in_one_file_that_shows_the_same_bytes_elsewhere() -> None:
    pool = KVPool(layout_for(SHAPES, "float32", page_size=4, num_pages=3), CPU, shareable=True)
    pool.values[1][2] = torch.randn(pool.values[1].shape[1:])
    region = pool.regions()[3]
    other = Arena.attach(os.dup(region.fd))
    seen = other.buffer[region.fd_offset : region.fd_offset + region.length].tobytes()
    assert seen == pool.values[1].numpy().tobytes()
    assert {r.fd for r in pool.regions()} == {region.fd}


def test_a_private_pool_names_no_file() -> None:
    pool = KVPool(layout_for(SHAPES, "float32", page_size=4, num_pages=3), CPU)
    assert {r.fd for r in pool.regions()} == {-1}


@pytest.mark.parametrize(
    ("sharing", "device", "has_windows", "expected"),
    [
        (Sharing.NONE, "cpu", False, False),
        (Sharing.WITH_HUGE_PAGES, "cpu", False, True),
        # Memory of window pages is not provided ahead of use, so it would have small pages.
        (Sharing.WITH_HUGE_PAGES, "cpu", True, False),
        (Sharing.ALWAYS, "cpu", True, True),
        (Sharing.ALWAYS, "cuda", False, False),
    ],
)
def test_a_pool_is_shareable_if_the_transport_gains_by_it(
    sharing: Sharing, device: str, has_windows: bool, expected: bool
) -> None:
    assert _is_shareable(sharing, torch.device(device), has_windows=has_windows) == expected


def test_a_shared_pool_on_another_device_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="choose another transfer backend than shm"):
        _arena(8, torch.device("cuda"), shareable=False, shared=cast(SharedPages, "of a cluster"))


@pytest.mark.parametrize("shareable", [False, True])
def test_memory_the_system_refuses_names_the_options(shareable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int, **options: bool) -> Arena:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("splitserve.engine.pool.Arena", refuse)
    with pytest.raises(ConfigError, match="Lower mem_fraction or max_total_tokens"):
        KVPool(layout_for(SHAPES, "float32", page_size=4, num_pages=3), CPU, shareable=shareable)
