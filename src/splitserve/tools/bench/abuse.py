"""`splitserve bench abuse`: the effect of hostile requests and connections on the streams of other clients.

1. One prefill and one decode worker start behind a router. Both KV pools are filled and one grammar is served, so that
   later growth of memory is not that of pools and libraries.
2. Clients stream all the time, each with one stream after another.
3. One attack at a time runs in a process of its own. A gap that overlaps the attack counts for it.
4. After each attack, every running stream must receive one more token and a new request must be answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

import aiohttp
import msgspec
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.errors import ClusterError, ConfigError
from splitserve.deploy.local import LocalCluster, wait_ready
from splitserve.process.child import ChildProcess
from splitserve.tools.bench.abuse_attacks import ATTACKS, AttackOrder, AttackResult
from splitserve.tools.bench.abuse_report import AbuseReport, AttackFigures
from splitserve.tools.bench.load import ask, client_session
from splitserve.tools.bench.machine import check_writable, describe_machine
from splitserve.tools.bench.prompts import Prompt
from splitserve.tools.bench.publish import publish
from splitserve.tools.bench.stream import Endpoint, LoadError, MeasuredStream, wait_closed
from splitserve.tools.bench.systems import READY_TIMEOUT, ServedSystem
from splitserve.tools.bench.workload import LoadRequest

NUM_STREAMS = 8
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 768
# Tokens of each KV pool: all streams, and as much again for the attacks.
_POOL_TOKENS = 2 * NUM_STREAMS * (_PROMPT_TOKENS + _OUTPUT_TOKENS)
_FILL_TOKENS = 1024
# Seconds for a stream to go on, and for a new request to be answered, after an attack.
_RECOVERY_TIMEOUT = 60.0
# Seconds between two samples of memory, and between two checks of the streams.
_SAMPLE_INTERVAL = 0.1
# Share of a core that samples of memory may take.
_SAMPLE_SHARE = 0.05
# Seconds that the process of an attack may take beyond its duration, to start and to build its bodies.
_ATTACK_GRACE = 60.0


@dataclass(frozen=True, slots=True)
class AbuseOptions:
    # Command line that repeats this benchmark.
    command: str
    model: str
    dtype: str
    # Keys of ATTACKS.
    attacks: Sequence[str]
    # Seconds for which an attack that is not answered goes on.
    duration: float
    append_to: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if unknown := [name for name in self.attacks if name not in ATTACKS]:
            raise ConfigError(f"--attack {unknown[0]}: no such attack; choose from {', '.join(ATTACKS)}")


def run_abuse_bench(options: AbuseOptions) -> int:
    """Return the exit code: 1 if an attack did harm. Raises ClusterError, LoadError."""
    if options.append_to is not None:
        check_writable(options.append_to)
    console = Console(stderr=True)
    system = ServedSystem(
        name="disaggregated",
        model=options.model,
        dtype=options.dtype,
        num_pairs=1,
        num_colocated=0,
        threads_each=1,
        pool_tokens=_POOL_TOKENS,
    )
    with system.cluster() as cluster:
        wait_ready(cluster, console, READY_TIMEOUT)
        endpoint = Endpoint(cluster.router_url, options.model)
        console.print("filling the KV pools, starting the grammar servers")
        _fill_pools(endpoint)
        _start_grammar_servers(cluster.router_url)
        figures = asyncio.run(_Abuse(cluster, endpoint, options, console).run())
    report = AbuseReport(options.model, options.dtype, options.command, NUM_STREAMS, describe_machine(), figures)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 0 if report.is_passed else 1


def _fill_pools(endpoint: Endpoint) -> None:
    for number in range(_POOL_TOKENS // _FILL_TOKENS + 2):
        ask(endpoint, [_prompt(1_000 + number, _FILL_TOKENS)], 2)


def _start_grammar_servers(router_url: str) -> None:
    """Serve one grammar: memory that grows later is not the library's."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "regex": "[a-z]+"}}
    request = urllib.request.Request(f"{router_url}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT) as response:
        response.read()


def _prompt(seed: int, num_tokens: int) -> Prompt:
    """Return a prompt of token ids that shares no prefix with another seed's.

    Valid for vocabularies of 300 tokens and more.
    """
    return Prompt(ids=[5 + (seed * 7919 + (i + seed) * i) % 251 for i in range(num_tokens)], text="")


@dataclass
class _Client:
    """One client with its streams, one after another."""

    number: int
    streams: list[MeasuredStream] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def run(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        for turn in count():
            request = LoadRequest(_prompt(self.number + NUM_STREAMS * turn, _PROMPT_TOKENS), _OUTPUT_TOKENS)
            self.streams.append(MeasuredStream(endpoint, request))
            # Older streams are measured already.
            del self.streams[:-4]
            try:
                await self.streams[-1].run(session)
            except LoadError as error:
                self.errors.append(error.message)
                await asyncio.sleep(_SAMPLE_INTERVAL)

    def gaps(self, began: float, ended: float) -> Iterator[float]:
        """Yield the gaps between tokens that overlap this interval."""
        for stream in self.streams:
            yield from (b - a for a, b in pairwise(stream.arrived_at) if b > began and a < ended)

    def ttfts(self, began: float, ended: float) -> Iterator[float]:
        """Yield the times to first token of streams that waited for it in this interval."""
        for stream in self.streams:
            if stream.arrived_at and stream.arrived_at[0] > began and stream.sent_at < ended:
                yield stream.arrived_at[0] - stream.sent_at

    def has_gone_on(self, since: float) -> bool:
        return any(stream.arrived_at and stream.arrived_at[-1] > since for stream in self.streams)


class _Abuse:
    def __init__(self, cluster: LocalCluster, endpoint: Endpoint, options: AbuseOptions, console: Console) -> None:
        self._cluster = cluster
        self._endpoint = endpoint
        self._options = options
        self._console = console
        self._clients = [_Client(number) for number in range(NUM_STREAMS)]

    async def run(self) -> list[AttackFigures]:
        """Return the figures of each attack. Raises LoadError if the streams do not start."""
        async with client_session() as session:
            tasks = [asyncio.create_task(client.run(self._endpoint, session)) for client in self._clients]
            try:
                if not await self._have_gone_on(0.0):
                    raise LoadError("the streams did not start: see the logs of router and workers")
                return [await self._attack(name, session) for name in self._options.attacks]
            finally:
                await wait_closed(tasks)

    async def _attack(self, name: str, session: aiohttp.ClientSession) -> AttackFigures:
        self._console.print(f"attack: {name}", highlight=False)
        for client in self._clients:
            client.errors.clear()
        memory = await asyncio.to_thread(_MemoryWatch, self._cluster.children)
        watching = asyncio.create_task(memory.watch())
        began = time.perf_counter()
        try:
            outcomes, errors = await self._run_process(name)
            ended = time.perf_counter()
            if not await self._have_gone_on(ended):
                errors.append(f"a stream had no token for {_RECOVERY_TIMEOUT:g} s after the attack")
            errors += await self._check_new_request(session)
        finally:
            await wait_closed([watching])
        errors += [f"a stream failed: {error}" for client in self._clients for error in client.errors[:1]]
        errors += [f"{child.name} ended" for child in self._cluster.children if child.exit_code is not None]
        gaps = [gap for client in self._clients for gap in client.gaps(began, ended)]
        ttfts = [ttft for client in self._clients for ttft in client.ttfts(began, ended)]
        return AttackFigures(
            name, max(gaps, default=_RECOVERY_TIMEOUT), max(ttfts, default=None), memory.growth, outcomes, errors
        )

    async def _run_process(self, name: str) -> tuple[dict[str, int], list[str]]:
        """Run one attack in a process. Return its outcomes and the problems of its process."""
        workers = [worker.url for worker in self._cluster.workers if worker.url is not None]
        order = AttackOrder(
            name=name,
            urls=[self._cluster.router_url, *workers],
            model=self._options.model,
            internal_ports=await asyncio.to_thread(_internal_ports, self._cluster),
            duration=self._options.duration,
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "splitserve.tools.bench.abuse_attacks"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(self._options.duration + _ATTACK_GRACE):
                output, _ = await process.communicate(msgspec.json.encode(order))
            return msgspec.json.decode(output, type=AttackResult).outcomes, []
        except TimeoutError:
            return {}, ["the attack's process did not end"]
        except msgspec.MsgspecError:
            return {}, [f"the attack's process ended with code {process.returncode}"]
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _have_gone_on(self, since: float) -> bool:
        """Wait until every client has a token that is newer than `since`."""
        deadline = time.perf_counter() + _RECOVERY_TIMEOUT
        while not all(client.has_gone_on(since) for client in self._clients):
            if time.perf_counter() > deadline:
                return False
            await asyncio.sleep(_SAMPLE_INTERVAL)
        return True

    async def _check_new_request(self, session: aiohttp.ClientSession) -> list[str]:
        try:
            async with asyncio.timeout(_RECOVERY_TIMEOUT):
                await MeasuredStream(self._endpoint, LoadRequest(_prompt(999, _PROMPT_TOKENS), 2)).run(session)
        except (LoadError, TimeoutError) as error:
            return [f"a new request failed after the attack: {error or 'no answer'}"]
        return []


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
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(max(_SAMPLE_INTERVAL, (time.perf_counter() - began) / _SAMPLE_SHARE))

    def _sample(self) -> None:
        sizes = self._sizes()
        self.growth = max([self.growth, *(size - self._at_start[name] for name, size in sizes.items())])

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
