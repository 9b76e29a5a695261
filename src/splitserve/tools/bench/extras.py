"""Additional measurements of `bench transfer`: zero-copy transfers (`--hand-over`) and the checksum.

- hand-over: seconds from the submission of an exchange of pages until the receiver has its new pages. No byte moves, so
  only the time matters, whatever the size.
- checksum: `--transfer-checksum` on one side, over pages of this size. Each side pays it once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.arena import Arena
from splitserve.core.layout import KVComponent, KVLayout
from splitserve.tools.bench.stats import median, percentile
from splitserve.tools.bench.transfer_peer import End, PeerProcess
from splitserve.tools.bench.transfer_plan import TransferCase, TransferPlan
from splitserve.tools.bench.transfer_report import TransferFigures
from splitserve.transfer.checksum import Checksums
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.transports import missing
from splitserve.transfer.transports.base import PeerAddress, WriteState
from splitserve.transfer.transports.session import SessionTransport

# Bytes of a page in the pool of smollm2: 16 tokens, all layers, bfloat16.
_PAGE_BYTES = 16 * 23040
_EXCHANGES = 200
# Bytes of one token in one component.
_TOKEN_BYTES = 256


def measure_extras(plan: TransferPlan) -> Iterator[TransferFigures]:
    if missing("shm") is None:
        for total in plan.totals:
            yield _hand_over(TransferCase(_PAGE_BYTES, total, scattered=True))
    for page_bytes in plan.page_sizes:
        yield _checksum(TransferCase(page_bytes, max(plan.totals[0], page_bytes), scattered=True), plan.runs)


def _hand_over(case: TransferCase) -> TransferFigures:
    num_pages = max(1, case.num_pages)
    with ExitStack() as closing:
        sender = End("shm", [4096])
        closing.callback(sender.close)
        session = closing.enter_context(PeerProcess("shm", [4096])).open_session()
        fd = os.memfd_create("splitserve-bench-pool", os.MFD_CLOEXEC)
        closing.callback(os.close, fd)
        giver, taker = (_join(fd, num_pages) for _ in range(2))
        closing.callback(giver.close)
        closing.callback(taker.close)
        seconds = [_exchange(sender, session, giver, taker, tag) for tag in range(1, _EXCHANGES + 1)]
    return TransferFigures.of(
        "hand-over",
        case,
        gb_per_s=case.total_bytes / median(seconds) / 1e9,
        limit_gb_per_s=None,
        alone=median(seconds),
        p50=percentile(seconds, 50),
        p99=percentile(seconds, 99),
        cpu_seconds_per_gb=0.0,
        num_writes=num_pages,
    )


def _join(fd: int, num_pages: int) -> SharedPages:
    # The pages are never accessed, so the file needs no space for them.
    file = Path(f"/proc/self/fd/{fd}")
    return SharedPages(file, pages_per_worker=num_pages, shape=bytes(16), arena_bytes=lambda n: 0)


def _exchange(end: End, session: PeerAddress, giver: SharedPages, taker: SharedPages, tag: int) -> float:
    """Exchange all pages of one pool for all of the other. Return the seconds that it took."""
    assert isinstance(end.transport, SessionTransport)
    ours, theirs = giver.owned(), taker.owned()
    began = time.perf_counter()

    def exchange() -> None:
        if not giver.exchange(ours, theirs, tag=tag, generation=taker.generation):
            raise RuntimeError("the exchange was refused")

    status = end.outcome(end.transport.call(session, exchange))
    got = taker.settle(theirs, tag=tag)
    seconds = time.perf_counter() - began
    if status.state is not WriteState.DONE or got != ours:
        raise RuntimeError(f"the exchange ended as {status.state.name}: {status.error}")
    giver.settle(ours, tag=tag)
    return seconds


def _checksum(case: TransferCase, runs: int) -> TransferFigures:
    tokens_a_page = case.page_bytes // _TOKEN_BYTES
    component = KVComponent("k", 0, "float32", num_heads=1, first_head=0, total_heads=1, head_dim=_TOKEN_BYTES // 4)
    layout = KVLayout(tokens_a_page, case.num_pages, (component,))
    arena = Arena(case.total_bytes)
    arena.buffer[:] = b"\x01" * case.total_bytes
    checksums, num_tokens = Checksums(layout, [arena.region()]), case.num_pages * tokens_a_page
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        checksums.of(RoomPages(range(case.num_pages)), range(num_tokens), num_tokens, tokens_a_page)
        seconds.append(time.perf_counter() - began)
    return TransferFigures.of(
        "checksum",
        case,
        gb_per_s=case.total_bytes / median(seconds) / 1e9,
        limit_gb_per_s=None,
        alone=median(seconds),
        p50=percentile(seconds, 50),
        p99=percentile(seconds, 99),
        cpu_seconds_per_gb=median(seconds) / case.total_bytes * 1e9,
        num_writes=case.num_pages,
    )
