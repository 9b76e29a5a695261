"""The planner against a naive copy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.disaggregation.copies import num_bytes
from splitserve.disaggregation.reshard import check_compatible, plan_copies
from splitserve.testing.kv_world import layout


@st.composite
def page_lists(draw):
    n = draw(st.integers(0, 12))

    # Half the time in runs, as an allocator gives them out.
    def pages(limit):
        if draw(st.booleans()):
            first = draw(st.integers(0, limit - n))
            return list(range(first, first + n))
        return draw(st.permutations(range(limit)))[:n]

    return pages(16), pages(20)


@given(page_lists(), st.integers(1, 3), st.integers(1, 3))
def test_copies_do_what_copying_page_by_page_does(pages, layers, heads):
    source, target = layout(16, layers=layers, heads=heads), layout(20, layers=layers, heads=heads)
    src_pages, dst_pages = pages
    size = source.components[0].page_bytes(source.page_size)
    src = [bytes((i * 31 + j) % 251 for j in range(16 * size)) for i in range(len(source.components))]
    naive = [bytearray(20 * size) for _ in source.components]
    planned = [bytearray(20 * size) for _ in source.components]
    for region in range(len(source.components)):
        for a, b in zip(src_pages, dst_pages, strict=True):
            naive[region][b * size : (b + 1) * size] = src[region][a * size : (a + 1) * size]
    copies = plan_copies(source, target, src_pages, dst_pages)
    for a, a_offset, b, b_offset, length in copies.tolist():
        planned[b][b_offset : b_offset + length] = src[a][a_offset:][:length]
    assert planned == naive
    assert num_bytes(copies) == len(src_pages) * source.bytes_per_page


def test_runs_contiguous_on_both_sides_are_one_copy():
    source = layout(layers=1)
    copies = plan_copies(source, source, [1, 2, 3, 7, 8], [11, 12, 13, 14, 16])
    size = source.components[0].page_bytes(source.page_size)
    assert (copies["length"] // size).tolist() == [3, 1, 1] * 2


@pytest.mark.parametrize(
    ("src_pages", "dst_pages", "words"),
    [([0], [0, 1], "1 source pages for 2"), ([64], [0], "source pages"), ([0], [-1], "target pages")],
)
def test_lists_that_do_not_fit_are_refused(src_pages, dst_pages, words):
    with pytest.raises(ValueError, match=words):
        plan_copies(layout(), layout(), src_pages, dst_pages)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (layout(page_size=8), "page size 4 against 8"),
        (layout(layers=1), "4 KV components against 2"),
        (layout(heads=2), "num_heads=2"),
        (layout(dtype="float16"), "float16"),
    ],
)
def test_layouts_that_do_not_fit_are_named(other, words):
    assert words in check_compatible(layout(), other)
    with pytest.raises(ValueError, match="layouts differ"):
        plan_copies(layout(), other, [], [])


def test_pools_of_different_size_fit():
    assert check_compatible(layout(10), layout(1000)) is None
