"""`splitserve bench serve`: TTFT of one long prompt, colocated and over each transport, and what compute hid of it.

1. For each chunk size a colocated worker and a pair over each backend start together. Each worker may use all cores:
   one prompt at a time is in the machine, and idle workers do not spin.
2. Each warms up with prompts of its own.
3. Runs in turn: the same fresh prompt of random words to each system, so that what else the machine does hits all.
4. The prefill workers say what their hand-overs took and how much of that came after the last forward pass.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from splitserve.bench.backends import choose_backends
from splitserve.bench.jobs import Job, PromptMaker
from splitserve.bench.load import LoadError
from splitserve.bench.machine import check_writable, describe_machine
from splitserve.bench.publish import publish
from splitserve.bench.serve_report import ServeFigures, ServeReport
from splitserve.bench.stats import StreamRecord, TtftFigures
from splitserve.bench.systems import READY_TIMEOUT, ServedSystem
from splitserve.config import DTYPES
from splitserve.core.request import DisaggregationMode
from splitserve.engine.sources import resolve_model
from splitserve.errors import ConfigError
from splitserve.launch.local import LocalCluster, num_cores
from splitserve.launch.transfers import Transfers, read_transfers
from splitserve.launch.up import wait_ready
from splitserve.server.tokenizer import Tokenizer

# Measured where none is named, as far as they are present.
DEFAULT_BACKENDS = ("tcp", "shm")
# Prompt tokens of a step: most of the transfer can hide, and nothing can.
CHUNK_SIZES = (512, 2048)
_WARM_UPS = 2
# Seconds a prefill worker gets to count a hand-over whose first token the client has already.
_COUNT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    model: str
    dtype: str
    # Empty: DEFAULT_BACKENDS.
    backends: tuple[str, ...]
    prompt_tokens: int
    runs: int
    # Markdown file that gets a section; None: none does.
    append_to: Path | None
    as_json: bool


def run_serve_bench(options: ServeBenchOptions) -> int:
    """Returns the exit code. Raises ConfigError, ClusterError, LoadError."""
    console = Console(stderr=True)
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.append_to is not None:
        check_writable(options.append_to)
    backends = choose_backends(options.backends, DEFAULT_BACKENDS, "--transfer-backend", console)
    tokenizer = Tokenizer.load(resolve_model(options.model))
    prompts = PromptMaker(lambda text: tokenizer.encode(text, add_special_tokens=False))
    figures = []
    for chunk in CHUNK_SIZES:
        figures += _measure_chunk(options, backends, chunk, prompts, console)
    report = ServeReport(options.model, options.dtype, _command(options), describe_machine(), figures)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 0


@dataclass(frozen=True, slots=True)
class _Running:
    system: ServedSystem
    cluster: LocalCluster

    def ask(self, prompt: list[int]) -> StreamRecord:
        return self.system.run_job(self.cluster.router_url, Job(prompts=[prompt], max_tokens=1))[0]

    def transfers(self, count: int) -> Transfers | None:
        """After `count` hand-overs in all; None where there are none. Raises LoadError where they do not show."""
        if not self.system.num_pairs:
            return None
        url = self.cluster.urls(DisaggregationMode.PREFILL)[0]
        deadline = time.monotonic() + _COUNT_TIMEOUT
        while (found := read_transfers(url)).count < count:
            if time.monotonic() > deadline:
                raise LoadError(f"{url} counts {found.count} hand-overs, {count} were made: see its log")
            time.sleep(0.05)
        return found


def _measure_chunk(
    options: ServeBenchOptions, backends: Sequence[str], chunk: int, prompts: PromptMaker, console: Console
) -> list[ServeFigures]:
    """Raises ClusterError, LoadError."""
    with ExitStack() as closing:
        running = [_Running(s, closing.enter_context(s.cluster())) for s in _systems(options, backends, chunk)]
        for one in running:
            wait_ready(one.cluster, console, READY_TIMEOUT)
        with console.status(f"chunks of {chunk}: warming up") as status:
            for _ in range(_WARM_UPS):
                prompt = prompts.make(options.prompt_tokens)
                for one in running:
                    one.ask(prompt)
            before = [one.transfers(_WARM_UPS) for one in running]
            records: list[list[StreamRecord]] = [[] for _ in running]
            for number in range(1, options.runs + 1):
                status.update(f"chunks of {chunk}: run {number} of {options.runs}")
                prompt = prompts.make(options.prompt_tokens)
                for one, its_records in zip(running, records, strict=True):
                    its_records.append(one.ask(prompt))
            after = [one.transfers(_WARM_UPS + options.runs) for one in running]
    ttfts = [TtftFigures.of(options.prompt_tokens, its_records) for its_records in records]
    return [
        ServeFigures.of(one.system.name, chunk, ttft, ttfts[0], None if a is None or b is None else a - b)
        for one, ttft, b, a in zip(running, ttfts, before, after, strict=True)
    ]


def _systems(options: ServeBenchOptions, backends: Sequence[str], chunk: int) -> list[ServedSystem]:
    """Colocated first."""
    # Decode keeps a reserve for each running request.
    pool_tokens = 4 * options.prompt_tokens
    args = ("--chunked-prefill-size", str(chunk))
    cores = num_cores()
    colocated = ServedSystem("colocated", options.model, options.dtype, 0, 1, cores, pool_tokens, worker_args=args)
    return [
        colocated,
        *(ServedSystem(b, options.model, options.dtype, 1, 0, cores, pool_tokens, b, args) for b in backends),
    ]


def _command(options: ServeBenchOptions) -> str:
    words = ["splitserve", "bench", "serve", options.model, "--dtype", options.dtype]
    for backend in options.backends:
        words += ["--transfer-backend", backend]
    return shlex.join([*words, "--prompt-tokens", str(options.prompt_tokens), "--runs", str(options.runs)])
