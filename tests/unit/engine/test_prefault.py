"""Memory of the KV pool that is provided before steps write to it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core import machine
from splitserve.core.layout import KVComponent, KVLayout
from splitserve.core.machine import HUGE_PAGE_BYTES, Arena
from splitserve.engine import prefault as prefault_module
from splitserve.engine.attention.base import PagedBatch
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.pool import KVPool
from splitserve.engine.prefault import Prefault

AHEAD = 2 * HUGE_PAGE_BYTES


class RecordingArena(Arena):
    """Arena that records the parts it should provide, and provides none."""

    def __init__(self, works: bool = True) -> None:
        super().__init__(1)
        self.works = works
        self.provided: list[tuple[int, int]] = []
        # While cleared, `provide` waits.
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_waiting = threading.Event()

    def provide(self, offset: int, length: int) -> bool:
        self.is_waiting.set()
        self.may_go.wait()
        self.provided.append((offset, length))
        return self.works

    def ends(self, parts: list[tuple[int, int, int]]) -> list[int]:
        """Return the end of the provided bytes of each part. Checks that they are one range, without overlap."""
        ends = []
        for begin, size, _ in parts:
            end = begin
            for offset, length in sorted(p for p in self.provided if begin <= p[0] < begin + size):
                assert (offset, length > 0) == (end, True)
                end += length
            ends.append(end - begin)
        return ends


def finish(prefault: Prefault) -> None:
    """Wait until the thread has done what it was asked for."""
    running = prefault._running
    if running is not None:
        running.result(60)


page_bytes = st.integers(1, 3 * HUGE_PAGE_BYTES)


@given(st.lists(page_bytes, min_size=1, max_size=3), st.integers(1, 16), st.lists(st.integers(0, 15), min_size=1))
def test_the_pages_in_use_and_some_ahead_are_provided_once(sizes: list[int], num_pages: int, used: list[int]) -> None:
    parts, offset = [], 0
    for size in sizes:
        parts.append((offset, size * num_pages, size))
        offset += size * num_pages + 7
    arena = RecordingArena()
    prefault = Prefault(arena, parts)
    highest = 0
    for page in used:
        highest = max(highest, page := page % num_pages)
        prefault.use(page)
        finish(prefault)
        for (_, size, each), end in zip(parts, arena.ends(parts), strict=True):
            assert min(size, (highest + 1) * each) <= end <= min(size, (highest + 1) * each + AHEAD)
    prefault.close()


def test_components_progress_together() -> None:
    parts = [(0, 3 * HUGE_PAGE_BYTES, 64), (3 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES, 64)]
    arena = RecordingArena()
    prefault = Prefault(arena, parts)
    prefault.use(0)
    finish(prefault)
    assert [offset // HUGE_PAGE_BYTES for offset, _ in arena.provided[:4]] == [0, 3, 1, 4]
    prefault.close()


class Steps:
    """Stand-in for the steps of a host: whether any runs, and one release per check."""

    def __init__(self) -> None:
        self.are_running = False
        self.checks = threading.Semaphore(0)

    def __call__(self) -> bool:
        self.checks.release()
        return self.are_running


def test_with_enough_memory_ahead_the_thread_waits_for_the_end_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault_module, "_MAX_WAIT", 60.0)
    arena, steps, pages_each = RecordingArena(), Steps(), HUGE_PAGE_BYTES // 64
    prefault = Prefault(arena, [(0, 8 * HUGE_PAGE_BYTES, 64)], steps)
    prefault.use(0)
    finish(prefault)
    assert arena.ends([(0, 8 * HUGE_PAGE_BYTES, 64)]) == [AHEAD + 64]
    steps.are_running = True
    while steps.checks.acquire(blocking=False):
        pass
    # A quarter of what is ahead is in use.
    prefault.use(pages_each // 2 + 1)
    for _ in range(3):
        assert steps.checks.acquire(timeout=60)
    assert arena.ends([(0, 8 * HUGE_PAGE_BYTES, 64)]) == [AHEAD + 64]
    steps.are_running = False
    finish(prefault)
    assert arena.ends([(0, 8 * HUGE_PAGE_BYTES, 64)]) == [AHEAD + 64 * (pages_each // 2 + 2)]
    prefault.close()


def test_with_little_memory_ahead_the_thread_works_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault_module, "_MAX_WAIT", 60.0)
    arena, steps = RecordingArena(), Steps()
    steps.are_running = True
    prefault = Prefault(arena, [(0, 8 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)], steps)
    prefault.use(0)
    # What is ahead of the page is enough in the end, so the last part waits.
    while len(arena.provided) < 2:
        assert steps.checks.acquire(timeout=60)
    prefault.use(4)
    while len(arena.provided) < 6:
        assert steps.checks.acquire(timeout=60)
    prefault.close()


def test_a_process_that_does_not_know_of_steps_never_waits_for_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault_module, "_CHECK_INTERVAL", 600.0)
    arena = RecordingArena()
    prefault = Prefault(arena, [(0, 100, 10)], lambda: None)
    prefault.use(3)
    finish(prefault)
    assert arena.ends([(0, 100, 10)]) == [100]
    prefault.close()


def test_the_wait_for_the_end_of_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault_module, "_MAX_WAIT", 0.0)
    arena, steps = RecordingArena(), Steps()
    steps.are_running = True
    prefault = Prefault(arena, [(0, 100, 10)], steps)
    prefault.use(3)
    finish(prefault)
    assert arena.ends([(0, 100, 10)]) == [100]
    prefault.close()


def test_a_system_that_cannot_provide_memory_is_asked_once() -> None:
    arena = RecordingArena(works=False)
    prefault = Prefault(arena, [(0, 100, 10), (100, 100, 10)])
    for page in (3, 9):
        prefault.use(page)
        finish(prefault)
    assert len(arena.provided) == 1
    prefault.close()


def test_after_memory_was_returned_it_is_provided_again() -> None:
    arena, parts = RecordingArena(), [(0, 100, 10)]
    prefault = Prefault(arena, parts)
    prefault.use(3)
    finish(prefault)
    prefault.forget()
    arena.provided.clear()
    prefault.use(0)
    finish(prefault)
    assert arena.ends(parts) == [100]
    prefault.close()


@pytest.mark.parametrize("end", [Prefault.forget, Prefault.close])
def test_the_end_waits_for_the_thread_and_no_longer(end) -> None:
    arena = RecordingArena()
    arena.may_go.clear()
    prefault = Prefault(arena, [(0, 100 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)])
    prefault.use(50)
    assert arena.is_waiting.wait(60)
    # While it works, further uses do not queue.
    prefault.use(60)
    ending = threading.Thread(target=end, args=(prefault,))
    ending.start()
    assert prefault._is_stopping.wait(60)
    arena.may_go.set()
    ending.join(60)
    assert not ending.is_alive()
    assert len(arena.provided) == 1
    prefault.close()


def resident(arena: Arena, offset: int, length: int) -> int:
    """Return how many pages of the system in this part are in memory."""
    pages = -(-length // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(arena.address + offset)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(length), found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.parametrize("shareable", [False, True])
def test_provided_memory_is_resident_and_keeps_its_content(shareable: bool) -> None:
    arena = Arena(64 * mmap.PAGESIZE, shareable=shareable)
    arena.buffer[5:8] = b"abc"
    if not arena.provide(0, 32 * mmap.PAGESIZE):
        pytest.skip("needs Linux 5.14: MADV_POPULATE_WRITE")
    assert resident(arena, 0, 32 * mmap.PAGESIZE) == 32
    assert bytes(arena.buffer[4:9]) == b"\0abc\0"


def has_collapse() -> bool:
    """Return whether this system is Linux 6.1 or later, and does not deny huge pages for files in memory."""
    settings = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not settings.exists() or "[deny]" in settings.read_text():
        return False
    return [int(number) for number in os.uname().release.split("-")[0].split(".")[:2]] >= [6, 1]


def huge_bytes(arena: Arena) -> int:
    """Return how many bytes of the arena's mapping are huge pages of this process."""
    found, in_arena = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            in_arena = words[0].startswith(f"{arena.address:x}-")
        elif in_arena and words[0] in ("ShmemPmdMapped:", "AnonHugePages:"):
            found += int(words[1]) * 1024
    return found


@pytest.mark.skipif(not has_collapse(), reason="needs Linux 6.1: MADV_COLLAPSE")
def test_provided_shareable_memory_is_in_huge_pages_in_every_mapping() -> None:
    arena = Arena(5 * HUGE_PAGE_BYTES - 1, shareable=True, huge=True)
    arena.buffer[5:8] = b"abc"
    # The end of one huge page and the beginning of the next one.
    assert arena.provide(HUGE_PAGE_BYTES - 7, 9)
    assert huge_bytes(arena) == 2 * HUGE_PAGE_BYTES
    assert bytes(arena.buffer[4:9]) == b"\0abc\0"
    # Once more, and the last one.
    assert arena.provide(0, 1)
    assert arena.provide(arena.num_bytes - 1, 1)
    assert huge_bytes(arena) == 3 * HUGE_PAGE_BYTES
    other = Arena.attach(os.dup(arena.region().fd))
    assert bytes(other.buffer[: arena.num_bytes]) == bytes(arena.buffer)
    assert huge_bytes(other) == 3 * HUGE_PAGE_BYTES
    arena.discard()
    assert bytes(other.buffer[4:9]) == bytes(5)


def test_a_system_without_huge_pages_provides_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, num_bytes: int, advice: int) -> None:
        if advice == machine._MADV_COLLAPSE:
            raise OSError(errno.EINVAL, "unknown")
        advise(address, num_bytes, advice)

    arena, advise = Arena(4 * HUGE_PAGE_BYTES, shareable=True, huge=True), machine.advise
    monkeypatch.setattr(machine, "advise", refuse)
    if not arena.provide(0, 3 * HUGE_PAGE_BYTES):
        pytest.skip("needs Linux 5.14: MADV_POPULATE_WRITE")
    assert resident(arena, 0, 3 * HUGE_PAGE_BYTES) == 3 * HUGE_PAGE_BYTES // mmap.PAGESIZE
    # `shares_huge_pages` has cached the answer of this system.
    assert not machine.shares_huge_pages.__wrapped__()


def test_a_shareable_arena_may_be_much_larger_than_the_memory_of_the_machine() -> None:
    arena = Arena(1 << 42, shareable=True, huge=True)
    arena.buffer[-3:] = b"end"
    assert bytes(Arena.attach(os.dup(arena.region().fd)).buffer[(1 << 42) - 3 : 1 << 42]) == b"end"


@pytest.mark.parametrize("shareable", [False, True])
def test_memory_stays_with_a_view_of_it(shareable: bool) -> None:
    arena = Arena(3 * HUGE_PAGE_BYTES, shareable=shareable, huge=True)
    view = arena.buffer[1:]
    del arena
    view[0:3] = b"abc"
    assert bytes(view[0:4]) == b"abc\0"


def test_a_pool_provides_memory_ahead_of_its_steps_and_again_after_a_release() -> None:
    component = KVComponent("k", 0, "float32", num_heads=1, first_head=0, total_heads=1, head_dim=1024)
    # A page has 64 KB, the pool 64 MB.
    layout = KVLayout(page_size=16, num_pages=1024, components=(component,))
    pool = KVPool(layout, torch.device("cpu"))
    arena, prefault = pool._arena, pool._prefault
    assert arena is not None
    assert prefault is not None
    finish(prefault)
    if not resident(arena, 0, HUGE_PAGE_BYTES):
        pytest.skip("needs Linux 5.14: MADV_POPULATE_WRITE")
    assert resident(arena, 32 << 20, HUGE_PAGE_BYTES) == 0
    pool.expect(512)
    finish(prefault)
    assert resident(arena, 32 << 20, HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES // mmap.PAGESIZE
    pool.discard()
    assert resident(arena, 0, HUGE_PAGE_BYTES) == 0
    # The padding page is not one of a request.
    pool.expect(layout.num_pages)
    assert prefault._running is None
    pool.expect(0)
    finish(prefault)
    assert resident(arena, 0, HUGE_PAGE_BYTES) > 0
    pool.close()


def test_a_step_lets_its_pool_provide_memory() -> None:
    component = KVComponent("k", 0, "float32", num_heads=1, first_head=0, total_heads=1, head_dim=1024)
    pool = KVPool(KVLayout(page_size=16, num_pages=1024, components=(component,)), torch.device("cpu"))
    expected: list[int] = []
    pool.expect = expected.append  # type: ignore[method-assign]
    pages = (np.array([3, 900]), np.array([17]))
    batch = PagedBatch(np.array([16, 0]), np.array([1, 5]), pages, page_size=16)
    TorchSdpaBackend(pool).plan(batch)
    assert expected == [900]
    pool.close()


def test_a_pool_of_window_pages_alone_has_no_memory_ahead() -> None:
    component = KVComponent("k", 0, "float32", num_heads=1, first_head=0, total_heads=1, head_dim=8, window=32)
    layout = KVLayout(page_size=16, num_pages=64, components=(component,), num_window_pages=8)
    pool = KVPool(layout, torch.device("cpu"))
    assert pool._prefault is None
    pool.expect(63)
    pool.close()
