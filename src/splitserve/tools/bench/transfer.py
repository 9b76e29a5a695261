"""`splitserve bench transfer`: each transport compared with its limit, between two processes of this machine.

1. For each total size, a receiving process and the sending end in this process start, with all memory touched and one
   session open.
2. For each case of that size there are several runs. In a run the limit and the transport write in turn, so that a
   disturbance of the machine affects both. Small writes are sent several at once, and the limit moves the bytes of all
   of them. The first writes of a run are not counted on either side, because connections and memory are new. Each run
   opens the limit again, because the location of its memory matters.
3. Then a write alone, and single pages in sequence, for the latency of small transfers.
4. Zero-copy transfers (`--hand-over`): from the submission of an exchange of pages until the receiver has its new ones.
   No byte moves, so only the time matters, whatever the size.
5. `--transfer-checksum` on one side, over pages of each size. Each side pays it once.

`transports/` has the transports, and `limits.py` their limits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.errors import ConfigError, SplitserveError
from splitserve.core.layout import KVComponent, KVLayout
from splitserve.core.machine import Arena
from splitserve.core.options import size_text
from splitserve.process.console import progress
from splitserve.tools.bench.limits import LIMITS, OpenLimit
from splitserve.tools.bench.options import TransferBenchOptions
from splitserve.tools.bench.report import Report
from splitserve.tools.bench.second_process import End, PeerProcess
from splitserve.tools.bench.stats import median
from splitserve.tools.bench.systems import choose_backends
from splitserve.tools.bench.transfer_plan import (
    FULL,
    GIB,
    PER_BYTE,
    QUICK,
    TransferCase,
    TransferPlan,
    TransferRow,
    batch_of,
    batches_a_run,
    copies_of,
    fits,
    latency_writes,
    memory_of,
    transfer_report,
    transfer_row,
)
from splitserve.transfer.copies import Copies, joined, num_bytes
from splitserve.transfer.pool_bytes import Checksums
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.transports import missing
from splitserve.transfer.transports.base import PeerAddress, WriteState
from splitserve.transfer.transports.session import SessionTransport

# Seconds for one write.
_WRITE_TIMEOUT = 60.0
# Bytes of a page in the pool of smollm2: 16 tokens, all layers, bfloat16.
_PAGE_BYTES = 16 * 23040
_EXCHANGES = 200
# Bytes of one token in one component.
_TOKEN_BYTES = 256


class TransferBenchError(SplitserveError):
    """A write of the benchmark failed."""

    reason = "transfer_failed"


def bench_transfer(options: TransferBenchOptions, console: Console) -> Report:
    """Measure the transports and return the report.

    Raises ConfigError if a named backend is absent, and SplitserveError.
    """
    if unknown := [backend for backend in options.backend if backend not in LIMITS]:
        raise ConfigError(f"--backend {unknown[0]!r}: choose one of {', '.join(LIMITS)}, which move memory of the CPU")
    plan = QUICK if options.quick else FULL
    chosen = choose_backends(options.backend, LIMITS, "--backend", console)
    figures = [f for backend in chosen for f in measure_backend(backend, plan, console)]
    if not options.backend:
        figures += measure_extras(plan)
    return transfer_report(plan.runs, figures)


def measure_backend(backend: str, plan: TransferPlan, console: Console) -> Iterator[TransferRow]:
    """Measure all cases that fit into memory. Raises SplitserveError."""
    for total in plan.totals:
        available = psutil.virtual_memory().available
        if not fits(total, available):
            room = f"{available / GIB:.1f} GiB of memory are available"
            console.print(f"{backend}: {size_text(total)} in all is left out: {room}", highlight=False)
            continue
        with (
            progress(console, f"{backend}: {size_text(total)} in all") as show,
            TransferPair(backend, memory_of(total)) as pair,
        ):
            for case in plan.cases(total):
                order = "scattered" if case.scattered else "contiguous"
                show(f"{backend}: {size_text(total)} in pages of {size_text(case.page_bytes)}, {order}")
                yield measure_case(pair, case, plan.runs, LIMITS[backend].opened)


class TransferPair:
    """Both ends of one backend, each with `num_bytes` of touched memory. The sending end is in this process."""

    def __init__(self, backend: str, num_bytes: int) -> None:
        self.backend = backend
        self.receiver = PeerProcess(backend, [num_bytes])
        self.sender = End(backend, [num_bytes], write_timeout=_WRITE_TIMEOUT)

    def __enter__(self) -> TransferPair:
        self.sender.memory[0][:] = 1
        self.receiver.ask("set", region=0, value=2)
        self.session: PeerAddress = self.receiver.open_session()
        return self

    def __exit__(self, *error: object) -> None:
        self.sender.close()
        self.receiver.kill()

    def write(self, *writes: Copies) -> float:
        """Return the seconds from the first submission until all bytes are confirmed. Raises TransferBenchError."""
        began = time.perf_counter()
        tickets = [self.sender.transport.write(self.session, copies) for copies in writes]
        # Writes complete in order, so the wait for the last comes first.
        statuses = [self.sender.outcome(ticket, 2 * _WRITE_TIMEOUT) for ticket in reversed(tickets)]
        seconds = time.perf_counter() - began
        for status in statuses:
            if status.state is not WriteState.DONE:
                raise TransferBenchError(f"{self.backend}: a write ended as {status.state.name}: {status.error}")
        return seconds


def measure_case(pair: TransferPair, case: TransferCase, runs: int, open_limit: OpenLimit) -> TransferRow:
    writes, repeats = batch_of(case), batches_a_run(case.total_bytes)
    all_bytes = joined(writes)
    found = [_run(pair, writes, all_bytes, repeats, open_limit) for _ in range(runs)]
    gb_per_s, limit_gb_per_s = run_of_median_ratio([(ours, limit) for ours, limit, _ in found])
    return transfer_row(
        pair.backend,
        case,
        gb_per_s=gb_per_s,
        limit_gb_per_s=limit_gb_per_s,
        alone=[pair.write(writes[i % len(writes)]) for i in range(max(runs, len(writes)))],
        latencies=_latencies(pair, case),
        cpu_seconds_per_gb=sum(cpu_seconds for _, _, cpu_seconds in found)
        / (runs * repeats * num_bytes(all_bytes) / 1e9),
        num_writes=len(writes[0]),
    )


def run_of_median_ratio(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return our speed and the limit's of the run with the median ratio.

    The machine's speed may change for minutes, and so between the runs of a case. Separate medians could be from
    different times.
    """
    return sorted(runs, key=lambda run: run[0] / run[1])[len(runs) // 2]


def _run(
    pair: TransferPair, writes: Sequence[Copies], all_bytes: Copies, repeats: int, open_limit: OpenLimit
) -> tuple[float, float, float]:
    """Return our speed and the limit's in GB/s, and the CPU seconds of our transport in both processes."""
    ours, limits, cpu_seconds = [], [], 0.0
    with open_limit(all_bytes) as write_bare:
        pair.write(*writes)
        cpu_seconds -= pair.receiver.ask("cpu_seconds")
        for _ in range(repeats):
            limits.append(write_bare())
            # The limit's sender is in this process, too.
            cpu_seconds -= time.process_time()
            ours.append(pair.write(*writes))
            cpu_seconds += time.process_time()
        cpu_seconds += pair.receiver.ask("cpu_seconds")
    num_gb = num_bytes(all_bytes) / 1e9
    return num_gb / median(ours), num_gb / median(limits), cpu_seconds


def _latencies(pair: TransferPair, case: TransferCase) -> list[float]:
    """Return the seconds of writes of one page each, at random places if the case is scattered."""
    one_by_one = copies_of(TransferCase(case.page_bytes, case.total_bytes, scattered=True), seed=1)
    if not case.scattered:
        one_by_one = np.sort(one_by_one, order="src_offset")
    count = latency_writes(case.page_bytes)
    return [pair.write(one_by_one[i % len(one_by_one)][None]) for i in range(count)]


def measure_extras(plan: TransferPlan) -> Iterator[TransferRow]:
    if missing("shm") is None:
        for total in plan.totals:
            yield _zero_copy(TransferCase(_PAGE_BYTES, total, scattered=True))
    for page_bytes in plan.page_sizes:
        yield _checksum(TransferCase(page_bytes, max(plan.totals[0], page_bytes), scattered=True), plan.runs)


def _zero_copy(case: TransferCase) -> TransferRow:
    """Exchange all pages of one pool for all of another's, many times."""
    num_pages = max(1, case.num_pages)
    with TransferPair("shm", 4096) as pair, ExitStack() as stack:
        fd = os.memfd_create("splitserve-bench-pool", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        path, shape = Path(f"/proc/self/fd/{fd}"), bytes(16)
        # The pages are never accessed, so the file needs no space for them.
        giver, taker = (
            SharedPages(path, pages_per_worker=num_pages, shape=shape, arena_bytes=lambda n: 0) for _ in range(2)
        )
        for pool in (giver, taker):
            stack.callback(pool.close)
        seconds = [_exchange(pair, giver, taker, tag) for tag in range(1, _EXCHANGES + 1)]
    # No byte moves, so figures per byte would mislead.
    return _timed_row("hand-over", case, seconds, cpu_seconds_per_gb=0.0) | dict.fromkeys(PER_BYTE)


def _exchange(pair: TransferPair, giver: SharedPages, taker: SharedPages, tag: int) -> float:
    """Exchange all pages of one pool for all of the other. Return the seconds that it took."""
    assert isinstance(pair.sender.transport, SessionTransport)
    ours, theirs = giver.owned(), taker.owned()
    began = time.perf_counter()

    def exchange() -> None:
        if not giver.exchange(ours, theirs, tag=tag, generation=taker.generation):
            raise TransferBenchError("the exchange was refused")

    status = pair.sender.outcome(pair.sender.transport.call(pair.session, exchange))
    got = taker.resolve(theirs, tag=tag)
    seconds = time.perf_counter() - began
    if status.state is not WriteState.DONE or got != ours:
        raise TransferBenchError(f"the exchange ended as {status.state.name}: {status.error}")
    giver.resolve(ours, tag=tag)
    return seconds


def _checksum(case: TransferCase, runs: int) -> TransferRow:
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
    return _timed_row("checksum", case, seconds, cpu_seconds_per_gb=median(seconds) / case.total_bytes * 1e9)


def _timed_row(name: str, case: TransferCase, seconds: Sequence[float], cpu_seconds_per_gb: float) -> TransferRow:
    """Return the figures of something that has no limit and moves nothing in several writes."""
    return transfer_row(
        name,
        case,
        gb_per_s=case.total_bytes / median(seconds) / 1e9,
        alone=seconds,
        latencies=seconds,
        cpu_seconds_per_gb=cpu_seconds_per_gb,
        num_writes=max(1, case.num_pages),
    )
