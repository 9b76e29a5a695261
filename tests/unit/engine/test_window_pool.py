"""How memory is divided between the pools of layers with and without sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cache.window_pages import least_window_pages
from splitserve.core.layout import KVLayout
from splitserve.engine.pool import WindowDemand, layout_for, most_pages, window_of_some
from splitserve.engine.probe import LayerShape

PAGE_SIZE = 4


def one_page(windows: Sequence[int | None]) -> KVLayout:
    """Of layers with such windows, each of 128 bytes a page."""
    shapes = [LayerShape(i, 1, 4, 4, window) for i, window in enumerate(windows)]
    return layout_for(shapes, "float32", page_size=PAGE_SIZE, num_pages=1)


@given(
    num_full=st.integers(1, 3),
    num_windowed=st.integers(0, 5),
    budget=st.integers(0, 400_000),
    ratio=st.floats(0.01, 1.0) | st.none(),
    window=st.integers(1, 60),
    step_tokens=st.integers(0, 40),
    max_requests=st.integers(1, 9),
)
def test_both_pools_take_the_memory_there_is_and_no_more(
    num_full: int, num_windowed: int, budget: int, ratio: float | None, window: int, step_tokens: int, max_requests: int
) -> None:
    layout = one_page([None] * num_full + [window] * num_windowed)
    demand = WindowDemand(ratio, step_tokens, max_requests)

    def beside(num_pages: int) -> int:
        return demand.num_window_pages(num_pages, PAGE_SIZE, window)

    def num_bytes(num_pages: int) -> int:
        of_both = replace(layout, num_pages=num_pages, num_window_pages=beside(num_pages))
        return sum(of_both.num_pages_of(c) * c.page_bytes(PAGE_SIZE) for c in of_both.components)

    found = most_pages(layout, budget, beside)
    assert num_bytes(found) <= budget < num_bytes(found + 1)
    assert beside(found) == 0 or least_window_pages(window, PAGE_SIZE, step_tokens) <= beside(found) < found


def test_a_stage_of_windowed_layers_alone_leaves_the_bound_to_the_others() -> None:
    layout, demand = one_page([20]), WindowDemand(0.5, 8, 4)
    # Four requests of seven pages and two of a step: more are of no use.
    assert demand.num_window_pages(1000, PAGE_SIZE, 20) == 30
    assert most_pages(layout, 30 * 128, lambda n: demand.num_window_pages(n, PAGE_SIZE, 20)) > 1 << 30
    # With less memory it is the one that sets it.
    assert most_pages(layout, 20 * 128, lambda n: demand.num_window_pages(n, PAGE_SIZE, 20)) == 40


@pytest.mark.parametrize(("window", "num_pages"), [(128, 250), (1024, 2000), (2047, 3999), (2048, 0), (4096, 0)])
def test_where_nobody_says_more_small_windows_have_small_pools_and_large_ones_none(window: int, num_pages: int) -> None:
    assert WindowDemand(None, 0, 1000).num_window_pages(4000, PAGE_SIZE, window) == num_pages
    assert WindowDemand(1.0, 0, 1000).num_window_pages(4000, PAGE_SIZE, window) == 0


@pytest.mark.parametrize(
    ("windows", "found"),
    [([None, 7, 5], 7), ([None, None], None), ([7, 5], None), ([], None)],
)
def test_a_model_is_hybrid_where_some_layers_have_windows(windows: list[int | None], found: int | None) -> None:
    assert window_of_some(one_page(windows), None) == found


class TwoStages:
    """Of a pipeline: answers of the other one are written down."""

    def __init__(self, others: list[int]) -> None:
        self._others = others

    def least(self, number: int) -> int:
        return min(number, self._others.pop(0))


@pytest.mark.parametrize(
    ("windows", "others", "found"),
    [([None], [0, -9], 9), ([7], [-1, 0], 7), ([7], [0, -9], None), ([7, None], [0, -9], 9), ([None], [-1, 0], None)],
)
def test_what_other_stages_have_counts(windows: list[int | None], others: list[int], found: int | None) -> None:
    # Minus one if the other stage has layers without a window, else minus its largest window.
    assert window_of_some(one_page(windows), TwoStages(others)) == found  # type: ignore[arg-type]
