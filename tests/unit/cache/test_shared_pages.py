"""One pool, several workers: every page has exactly one owner, whatever is exchanged and whichever worker dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.cache.shared_pages import MAX_WORKERS, SharedPages
from splitserve.core.errors import ConfigError

PAGES = 12
TAG = 77


@pytest.fixture
def file():
    fd = os.memfd_create("pool")
    yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    os.close(fd)


def join(file, pages=PAGES, shape=b"s" * 16):
    return SharedPages(file, pages_per_worker=pages, shape=shape, arena_bytes=lambda n: 4096 * n)


def test_workers_own_different_pages_of_one_pool(file):
    one, two = join(file), join(file)
    assert len(one.owned()) == len(two.owned()) == PAGES
    assert not set(one.owned()) & set(two.owned())
    assert one.identity == two.identity


def test_an_exchange_swaps_owners_and_both_sides_learn_of_it(file):
    prefill, decode = join(file), join(file)
    ours, theirs = prefill.owned()[:3], decode.owned()[4:7]
    assert prefill.exchange(ours, theirs, tag=TAG, generation=decode.generation)
    assert decode.resolve(theirs, tag=TAG) == ours
    assert prefill.resolve(ours, tag=TAG) == theirs
    assert set(theirs) < set(prefill.owned())
    assert set(ours) < set(decode.owned())
    assert len(prefill.owned()) == len(decode.owned()) == PAGES


def test_pages_that_were_not_exchanged_stay(file):
    decode = join(file)
    pages = decode.owned()[:4]
    assert decode.resolve(pages, tag=TAG) == pages


def test_a_page_that_went_on_before_the_first_exchange_was_resolved_does_not_confuse_it(file):
    """Decode is slow: pages it gave return in a second exchange before it resolves the first."""
    prefill, decode = join(file), join(file)
    first, second = decode.owned()[:1], decode.owned()[1:2]
    ours = prefill.owned()[:1]
    prefill.exchange(ours, first, tag=1, generation=decode.generation)
    prefill.exchange(prefill.resolve(ours, tag=1), second, tag=2, generation=decode.generation)
    assert decode.resolve(second, tag=2) == first
    assert decode.resolve(first, tag=1) == ours
    assert set(first + ours) < set(decode.owned())


def test_an_exchange_whose_giver_is_killed_between_its_two_steps_is_finished_by_the_other(file):
    prefill, decode = join(file), join(file)
    ours, theirs = prefill.owned()[:2], decode.owned()[:2]
    prefill.exchange(ours, theirs, tag=TAG, generation=decode.generation)
    # As if the second step had not been taken.
    decode._owners[theirs] = decode.place
    decode._in_flight[prefill.place] = TAG
    assert decode.resolve(theirs, tag=TAG) == ours
    assert set(theirs) < set(prefill.owned())
    assert len(decode.owned()) == PAGES


def test_a_second_round_with_the_same_pages_is_not_confused_by_the_first(file):
    prefill, decode = join(file), join(file)
    ours, theirs = prefill.owned()[:2], decode.owned()[:2]
    prefill.exchange(ours, theirs, tag=TAG, generation=decode.generation)
    now = decode.resolve(theirs, tag=TAG)
    # Announced again, and this time without an exchange.
    assert decode.resolve(now, tag=TAG) == now
    # And back.
    prefill.exchange(theirs, now, tag=TAG, generation=decode.generation)
    assert decode.resolve(now, tag=TAG) == theirs


def test_a_worker_that_is_gone_gets_nothing(file):
    prefill, decode = join(file), join(file)
    theirs, generation = decode.owned()[:2], decode.generation
    decode.close()
    successor = join(file)
    assert successor.owned()[:2] == theirs
    assert not prefill.exchange(prefill.owned()[:2], theirs, tag=TAG, generation=generation)
    assert len(prefill.owned()) == len(successor.owned()) == PAGES


def test_a_successor_owns_what_its_predecessor_owned(file):
    prefill, decode = join(file), join(file)
    prefill.exchange(prefill.owned()[:5], decode.owned()[:5], tag=TAG, generation=decode.generation)
    owned = decode.owned()
    decode.close()
    successor = join(file)
    assert successor.owned() == owned
    assert successor.resolve(owned, tag=TAG) == owned


def test_a_killed_process_frees_its_place(file):
    code = (
        "import sys\nfrom pathlib import Path\nfrom splitserve.cache.shared_pages import SharedPages\n"
        f"pages = SharedPages(Path(sys.argv[1]), pages_per_worker={PAGES}, shape=b's' * 16, arena_bytes=lambda n: n)\n"
        "print(pages.place, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        place = int(process.stdout.readline())
        assert join(file).place != place
        process.kill()
        process.wait()
        assert join(file).place == place


def test_only_whats_ours_can_be_given_and_only_as_many_as_asked_for(file):
    prefill, decode = join(file), join(file)
    with pytest.raises(ValueError, match="not ours"):
        prefill.exchange(decode.owned()[:1], decode.owned()[1:2], tag=TAG, generation=decode.generation)
    with pytest.raises(ValueError, match="2 pages cannot be exchanged for 1"):
        prefill.exchange(prefill.owned()[:2], decode.owned()[:1], tag=TAG, generation=decode.generation)


def test_a_pool_of_another_shape_is_refused_with_both_values(file):
    join(file)
    with pytest.raises(ConfigError, match=f"{(b's' * 16).hex()} against {(b't' * 16).hex()}"):
        join(file, shape=b"t" * 16)


def test_whoever_comes_later_takes_the_size_that_the_first_chose(file):
    first, second = join(file), join(file, pages=PAGES + 1)
    assert len(second.owned()) == PAGES
    assert second.arena_offset == first.arena_offset
    assert os.fstat(second.fd).st_size == second.arena_offset + 4096 * first.num_pages


def test_a_full_pool_and_a_missing_file_are_named(file):
    workers = [join(file) for _ in range(MAX_WORKERS)]
    with pytest.raises(ConfigError, match="16 workers share the pool"):
        join(file)
    for worker in workers:
        worker.close()
    with pytest.raises(ConfigError, match="cannot be opened"):
        join(Path("/nowhere/pool"))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 6), st.booleans()), max_size=25))
def test_whatever_is_exchanged_each_page_has_one_owner_and_each_worker_as_many_as_before(steps):
    fd = os.memfd_create("pool")
    workers = [join(Path(f"/proc/self/fd/{fd}")) for _ in range(3)]
    held = [w.owned() for w in workers]
    try:
        for giver, taker, count, restarts in steps:
            if giver == taker:
                continue
            ours, theirs = held[giver][:count], held[taker][-count:]
            assert workers[giver].exchange(ours, theirs, tag=TAG, generation=workers[taker].generation)
            held[giver] = held[giver][count:] + theirs
            workers[giver].resolve(ours, tag=TAG)
            held[taker] = held[taker][:-count] + workers[taker].resolve(theirs, tag=TAG)
            if restarts:
                workers[taker].close()
                workers[taker] = join(Path(f"/proc/self/fd/{fd}"))
            assert [sorted(h) for h in held] == [w.owned() for w in workers]
        assert len({p for h in held for p in h}) == 3 * PAGES
    finally:
        for worker in workers:
            worker.close()
        os.close(fd)
