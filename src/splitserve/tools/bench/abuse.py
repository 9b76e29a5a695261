"""`splitserve bench abuse`: the effect of hostile requests and connections on the streams of other clients.

1. One prefill and one decode worker start behind a router. Both KV pools are filled and one grammar is served, so that
   later growth of memory is not that of pools and libraries.
2. Clients stream all the time, each with one stream after another.
3. One attack at a time runs in a process of its own. A gap that overlaps the attack counts for it, and so does each
   failed stream since the end of the attack before.
4. After each attack, every running stream must receive one more token and a new request must be answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count, pairwise

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.errors import ClusterError, ConfigError
from splitserve.deploy.local import LocalCluster
from splitserve.process.child import ChildProcess
from splitserve.tools.bench.abuse_attacks import ATTACKS, AttackOrder, send_attack
from splitserve.tools.bench.load import Endpoint, StreamLoad, run_load, running_load
from splitserve.tools.bench.options import AbuseBenchOptions
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.second_process import SecondProcess, SecondProcessError
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.systems import READY_TIMEOUT, Running, fill_pools, our_cluster
from splitserve.tools.bench.workload import LoadRequest, Prompt
from splitserve.tools.client import RequestFailedError, call

NUM_STREAMS = 8
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 768
# Tokens of each KV pool: all streams, and as much again for the attacks.
_POOL_TOKENS = 2 * NUM_STREAMS * (_PROMPT_TOKENS + _OUTPUT_TOKENS)
# Seconds for a stream to go on, and for a new request to be answered, after an attack.
_RECOVERY_TIMEOUT = 60.0
# Seconds between two samples of memory, and between two checks of the streams.
_SAMPLE_INTERVAL = 0.1
# Share of a core that samples of memory may take.
_SAMPLE_SHARE = 0.05
# Seconds that the process of an attack may take beyond its duration, to start and to build its bodies.
_ATTACK_GRACE = 60.0
# Longest allowed time between two tokens of a running stream, seconds.
MAX_GAP = 1.0
# Largest allowed growth of the memory of one worker or of the router during one attack, bytes.
MAX_GROWTH = 300_000_000
# Statuses that only a bug in Splitserve can cause.
_FAULTS = frozenset({"HTTP 500", "HTTP 502", "HTTP 504"})


@dataclass(frozen=True, slots=True)
class AttackFigures:
    """Figures of one attack, in seconds and bytes."""

    name: str
    # Longest time between two tokens of one running stream.
    longest_gap: float
    # Longest time from sending a new stream to its first token. None: no stream started during the attack.
    longest_ttft: float | None
    # Largest growth of the memory of one worker with all its processes, or of the router: peak over start.
    growth: int
    # Outcome -> number of requests or connections of the attack with that outcome.
    outcomes: Mapping[str, int]
    # Problems that the streaming clients and the check after the attack found.
    errors: Sequence[str]

    @property
    def problems(self) -> list[str]:
        """Return why the attack counts as harmful. Empty: it did no harm."""
        found = []
        if self.longest_gap >= MAX_GAP:
            found.append(f"gap of {self.longest_gap:.1f} s")
        if self.growth > MAX_GROWTH:
            found.append(f"{self.growth / 1e6:.0f} MB of growth")
        faults = {outcome: count for outcome, count in self.outcomes.items() if outcome in _FAULTS}
        return [*found, *(f"{count} x {outcome}" for outcome, count in faults.items()), *self.errors]


def abuse_report(options: AbuseBenchOptions, attacks: Sequence[AttackFigures]) -> Report:
    """Return the report. JSON is in seconds and bytes."""
    failed = any(attack.problems for attack in attacks)
    return Report(
        title=f"Streams under attack: {options.model} in {options.dtype}",
        figures={
            "model": options.model,
            "dtype": options.dtype,
            "num_streams": NUM_STREAMS,
            "attacks": [asdict(attack) | {"problems": attack.problems} for attack in attacks],
            "limits": {"longest_gap": MAX_GAP, "growth": MAX_GROWTH},
            "passed": not failed,
        },
        tables=[ReportTable.by_row(_COLUMNS, attacks)],
        legend=(
            f"{NUM_STREAMS} clients stream from one prefill and one decode worker while each attack runs. Limits: gaps "
            f"of {MAX_GAP:g} s, growth of {MAX_GROWTH / 1e6:.0f} MB for each worker and for the router."
        ),
        failed=failed,
    )


_COLUMNS: Cells[AttackFigures] = (
    ("attack", "{name}"),
    ("longest gap, ms", "{longest_gap:ms,.0f}"),
    ("longest TTFT, ms", "{longest_ttft:ms,.0f}"),
    ("growth, MB", "{growth:MB,.0f}"),
    ("outcomes", lambda a: ", ".join(f"{count} x {outcome}" for outcome, count in sorted(a.outcomes.items()))),
    ("verdict", lambda a: "; ".join(a.problems) or "ok"),
)


def bench_abuse(options: AbuseBenchOptions, console: Console) -> Report:
    """Run the attacks and return the report, which has failed if an attack did harm.

    Raises ConfigError, ClusterError, RequestFailedError.
    """
    if unknown := [name for name in options.attack if name not in ATTACKS]:
        raise ConfigError(f"--attack {unknown[0]}: no such attack; choose from {', '.join(ATTACKS)}")
    with our_cluster(console, options, 1, _POOL_TOKENS, is_pair=True) as cluster:
        endpoint = Endpoint(cluster.router_url, options.model)
        console.print("filling the KV pools, starting the grammar servers")
        seeds = count(1_000)
        fill_pools(Running(endpoint, pool_tokens=_POOL_TOKENS), lambda length: _prompt(next(seeds), length))
        # Serve one grammar: memory that grows later is not the library's.
        sampling = {"max_new_tokens": 2, "regex": "[a-z]+"}
        call(f"{cluster.router_url}/generate", {"text": "a", "sampling_params": sampling}, timeout=READY_TIMEOUT)
        return abuse_report(options, asyncio.run(_attack_all(cluster, endpoint, options, console)))


async def _attack_all(
    cluster: LocalCluster, endpoint: Endpoint, options: AbuseBenchOptions, console: Console
) -> list[AttackFigures]:
    """Run the attacks while clients stream, each one stream after another.

    Raises RequestFailedError if the streams do not start.
    """
    requests = (LoadRequest(_prompt(number, _PROMPT_TOKENS), _OUTPUT_TOKENS) for number in count())
    figures = []
    async with running_load(endpoint, requests, concurrency=NUM_STREAMS, pause=_SAMPLE_INTERVAL) as load:
        if not await _go_on(load, 0.0):
            raise RequestFailedError("the streams did not start: see the logs of router and workers")
        for name in options.attack or ATTACKS:
            console.print(f"attack: {name}", highlight=False)
            ports = await asyncio.to_thread(_internal_ports, cluster)
            urls = [cluster.router_url, *(w.url for w in cluster.workers if w.url is not None)]
            order = AttackOrder(name, urls, options.model, ports, options.duration)
            figures.append(await _attack(order, cluster.children, endpoint, load))
    return figures


def _prompt(seed: int, num_tokens: int) -> Prompt:
    """Return a prompt of token ids that shares no prefix with another seed's.

    Valid for vocabularies of 300 tokens and more.
    """
    return Prompt(ids=[5 + (seed * 7919 + (i + seed) * i) % 251 for i in range(num_tokens)], text="")


def gaps_in(streams: Iterable[StreamRecord], began: float, ended: float) -> list[float]:
    """Return the gaps between tokens that overlap this interval."""
    return [b - a for s in streams for a, b in pairwise(s.arrived_at) if b > began and a < ended]


def ttfts_in(streams: Iterable[StreamRecord], began: float, ended: float) -> list[float]:
    """Return the times to first token of streams that waited for it in this interval."""
    return [
        s.arrived_at[0] - s.sent_at for s in streams if s.arrived_at and s.arrived_at[0] > began and s.sent_at < ended
    ]


def have_gone_on(streams: Sequence[StreamRecord], since: float) -> bool:
    """Return whether every client has a stream with a token that is newer than `since`."""
    return len(streams) == NUM_STREAMS and all(s.arrived_at and s.arrived_at[-1] > since for s in streams)


async def _attack(
    order: AttackOrder, children: Sequence[ChildProcess], endpoint: Endpoint, load: StreamLoad
) -> AttackFigures:
    memory = await asyncio.to_thread(_MemoryWatch, children)
    watching = asyncio.create_task(memory.watch())
    began = time.perf_counter()
    try:
        outcomes, errors = await asyncio.to_thread(_attack_in_process, order)
        ended = time.perf_counter()
        if not await _go_on(load, ended):
            errors.append(f"a stream had no token for {_RECOVERY_TIMEOUT:g} s after the attack")
        found = await run_load(endpoint, [LoadRequest(_prompt(999, _PROMPT_TOKENS), 2)], timeout=_RECOVERY_TIMEOUT)
        errors += [f"a new request failed after the attack: {error}" for error in found.errors]
    finally:
        watching.cancel()
    errors += [f"a stream failed: {error}" for error in load.errors]
    # Clear here and not at the start of the next attack: errors in between count for the next attack.
    load.errors.clear()
    errors += [f"{child.name} ended" for child in children if child.exit_code is not None]
    gap = max(gaps_in(load.streams, began, ended), default=_RECOVERY_TIMEOUT)
    ttft = max(ttfts_in(load.streams, began, ended), default=None)
    return AttackFigures(order.name, gap, ttft, memory.growth, outcomes, errors)


async def _go_on(load: StreamLoad, since: float) -> bool:
    """Wait until every client has a token that is newer than `since`."""
    deadline = time.perf_counter() + _RECOVERY_TIMEOUT
    while not have_gone_on(load.running, since):
        if time.perf_counter() > deadline:
            return False
        await asyncio.sleep(_SAMPLE_INTERVAL)
    return True


def _attack_in_process(order: AttackOrder) -> tuple[dict[str, int], list[str]]:
    """Run one attack in a process. Return its outcomes and the problems of its process."""
    try:
        with SecondProcess(send_attack, order) as process:
            return process.receive(order.duration + _ATTACK_GRACE), []
    except SecondProcessError as error:
        return {}, [f"the attack: {error.message}"]


class _MemoryWatch:
    """Memory of the router and of each worker with all its processes, compared with that at construction."""

    def __init__(self, children: Sequence[ChildProcess]) -> None:
        self._pids = {child.name: child.pid for child in children if child.exit_code is None}
        self._at_start = self._sizes()
        # Largest growth of the router or of one worker, bytes.
        self.growth = 0

    async def watch(self) -> None:
        """Sample in a thread: the sizes of many grammar processes take longer than a gap between two tokens."""
        while True:
            began = time.perf_counter()
            sizes = await asyncio.to_thread(self._sizes)
            self.growth = max([self.growth, *(size - self._at_start[name] for name, size in sizes.items())])
            await asyncio.sleep(max(_SAMPLE_INTERVAL, (time.perf_counter() - began) / _SAMPLE_SHARE))

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for name, pid in self._pids.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                sizes[name] = sum(_resident(p) for p in [process, *process.children(recursive=True)])
        return sizes


def _resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process. 0: it has just ended.

    Grammar processes share most of their memory: only their own counts.
    """
    try:
        if "splitserve.engine.grammar_process" in process.cmdline():
            return int(process.memory_full_info().uss)
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _internal_ports(cluster: LocalCluster) -> list[int]:
    """Return the TCP ports on which workers listen, without those of HTTP. Raises ClusterError if there is none."""
    http = {int(worker.url.rsplit(":", 1)[1]) for worker in cluster.workers if worker.url is not None}
    ports = set()
    for child in cluster.children[1:]:
        process = psutil.Process(child.pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                ports |= {c.laddr.port for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    if not ports - http:
        raise ClusterError("found no internal port of the workers: run this as the user that owns their processes")
    return sorted(ports - http)
