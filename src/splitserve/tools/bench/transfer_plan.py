"""Cases of `bench transfer`: sizes, the order of pages, and whether they fit into this machine's memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from splitserve.transfer.copies import COPY, Copies, coalesce

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Smaller writes are sent several at once, each between its own places. So many requests are always in flight, and no
# cache holds their pages. At 32 MiB, a cache of the same size still held some pages of a memcpy.
_MIN_BYTES_AT_ONCE = 64 * MIB
# Minimum bytes of a run: smaller batches are repeated. With half of it, two measurements of raw sockets differed by up
# to 5 % (medians of 5).
_MIN_BYTES_A_RUN = GIB
# Writes for the latency of one page: the first number, but fewer if they would move more than this many bytes.
_LATENCY_WRITES = 300
_MIN_LATENCY_WRITES = 100
_MAX_LATENCY_BYTES = 128 * MIB
# Buffers in use: source and target of the transport, source and target of the limit.
_BUFFERS = 4
# Share of the available memory to use: other processes need memory, too.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TransferCase:
    """`total_bytes` in pages of `page_bytes`."""

    page_bytes: int
    total_bytes: int
    # Source and target pages each in their own random order. False: both in order, which coalesces to one copy.
    scattered: bool

    @property
    def num_pages(self) -> int:
        return self.total_bytes // self.page_bytes


@dataclass(frozen=True, slots=True)
class TransferPlan:
    page_sizes: tuple[int, ...]
    totals: tuple[int, ...]
    # Runs of each case. The figure is their median.
    runs: int

    def cases(self, total_bytes: int) -> Iterator[TransferCase]:
        for page_bytes in self.page_sizes:
            if page_bytes <= total_bytes:
                yield TransferCase(page_bytes, total_bytes, scattered=True)
                yield TransferCase(page_bytes, total_bytes, scattered=False)


FULL = TransferPlan((4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB), (MIB, 64 * MIB, GIB), runs=5)
QUICK = TransferPlan((4 * KIB, 64 * KIB), (8 * MIB,), runs=3)


def copies_of(case: TransferCase, seed: int = 0) -> Copies:
    """Return copies from region 0 into region 0, both of the case's size, coalesced like those of KV transfers."""
    pages = np.arange(case.num_pages, dtype=np.uint64) * np.uint64(case.page_bytes)
    table = np.zeros(case.num_pages, dtype=COPY)
    random = np.random.default_rng(seed)
    table["src_offset"] = random.permutation(pages) if case.scattered else pages
    table["dst_offset"] = random.permutation(pages) if case.scattered else pages
    table["length"] = case.page_bytes
    return coalesce(table)


def writes_at_once(total_bytes: int) -> int:
    return max(1, _MIN_BYTES_AT_ONCE // total_bytes)


def memory_of(total_bytes: int) -> int:
    """Return the bytes of one side."""
    return writes_at_once(total_bytes) * total_bytes


def batch_of(case: TransferCase) -> list[Copies]:
    """Return the writes in flight at once, each with the same pages in the next range of memory."""
    writes = []
    for i in range(writes_at_once(case.total_bytes)):
        copies = copies_of(case)
        for offset in ("src_offset", "dst_offset"):
            copies[offset] += np.uint64(i * case.total_bytes)
        writes.append(copies)
    return writes


def batches_a_run(total_bytes: int) -> int:
    return max(1, _MIN_BYTES_A_RUN // memory_of(total_bytes))


def latency_writes(page_bytes: int) -> int:
    return max(_MIN_LATENCY_WRITES, min(_LATENCY_WRITES, _MAX_LATENCY_BYTES // page_bytes))


def fits(total_bytes: int, available_bytes: int) -> bool:
    """Return whether all buffers of a case leave enough of the machine's memory to other processes."""
    return _BUFFERS * memory_of(total_bytes) <= _MEMORY_SHARE * available_bytes
