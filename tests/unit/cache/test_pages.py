import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cache.pages import PageAllocator, ReqToTokenPool, kv_to_page_num


@given(st.integers(1, 40), st.lists(st.integers(0, 12), max_size=60), st.randoms(use_true_random=False))
def test_every_page_is_free_or_held_once(num_pages, sizes, random):
    pages = PageAllocator(num_pages)
    held: list[list[int]] = []
    for size in sizes:
        if size <= pages.available():
            held.append(pages.alloc(size))
        elif held:
            pages.free(held.pop(random.randrange(len(held))))
        taken = [p for group in held for p in group]
        assert len(taken) == len(set(taken))
        assert all(0 <= p < num_pages for p in taken)
        assert len(taken) + pages.available() == num_pages


def test_a_fresh_pool_hands_out_neighbours():
    assert PageAllocator(8).alloc(5) == [0, 1, 2, 3, 4]


def test_freed_pages_come_back_in_their_order():
    pages = PageAllocator(8)
    run = pages.alloc(4)
    pages.free(run)
    assert pages.alloc(4) == run


def test_asking_for_more_than_is_free_takes_nothing():
    pages = PageAllocator(3)
    with pytest.raises(MemoryError, match="4 pages asked for"):
        pages.alloc(4)
    assert pages.available() == 3


def test_a_double_free_is_caught():
    pages = PageAllocator(3)
    taken = pages.alloc(2)
    pages.free(taken[:1])
    with pytest.raises(ValueError, match="freed twice"):
        pages.free(taken[:1])


def test_rows_are_written_and_given_back():
    rows = ReqToTokenPool(2, max_context_len=40, page_size=16)
    assert rows.table.shape == (2, 3)
    row = rows.alloc()
    rows.write(row, 1, [7, 9])
    assert rows.table[row].tolist() == [0, 7, 9]
    rows.alloc()
    with pytest.raises(MemoryError):
        rows.alloc()
    rows.free(row)
    with pytest.raises(ValueError, match="freed twice"):
        rows.free(row)
    assert rows.available_size() == 1


@given(st.integers(0, 1000), st.integers(1, 64))
def test_page_count_is_the_smallest_that_holds_the_tokens(tokens, page_size):
    pages = kv_to_page_num(tokens, page_size)
    assert pages * page_size >= tokens > (pages - 1) * page_size or tokens == pages == 0
