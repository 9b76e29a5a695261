"""Systems that benchmarks measure.

Colocated and disaggregated serving are LocalClusters behind their router. A running server receives requests as it is.
Plain transformers is a process that answers without HTTP. Servers of other engines, the peers, have a script each in
`bench/peers/` of the repository with two verbs. The README there has the contract.
1. `install` installs everything into the peer's folder in the cache, once. If it fails, its last line is the reason for
   skipping the peer.
2. `serve` becomes the server. It is ready when GET /health returns 200. It is stopped with all its processes.
To add a peer, write a script and add its name to PEERS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.api.http_server import bind, port_of
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.environment import cache_dir
from splitserve.core.errors import ClusterError, ConfigError, SplitserveError
from splitserve.core.machine import num_cores
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.process.child import ChildProcess, ForeignServer
from splitserve.process.lifecycle import ReadyInfo
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.options import PEERS, ModelBenchOptions
from splitserve.tools.bench.second_process import VARIANTS, SecondProcess, SecondProcessError
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import Encode, Prompt
from splitserve.tools.client import STREAM_TIMEOUT, RequestFailedError
from splitserve.transfer.transports import missing

# Seconds for a system to start. Some compile during startup.
READY_TIMEOUT = 600.0
_ROUTER_TIMEOUT = 60.0
# Beside this package's sources in a checkout.
DEFAULT_SCRIPTS = Path(__file__).parents[4] / "bench" / "peers"
# Seconds for an installation: a large download on a slow line.
_INSTALL_TIMEOUT = 1800.0
_POLL_INTERVAL = 0.1
# Prompts at once that fill KV pools, and the length of each.
_FILL_PROMPTS = 8
_FILL_TOKENS = 128
# Model name that scripts serve. One peer uses the folder as its name.
_SERVED_NAME = "peer"


@dataclass(frozen=True, slots=True)
class Running:
    """Server that is ready."""

    endpoint: Endpoint
    # Prefill worker of ours, if there are KV transfers. None: no transfers, or unknown.
    prefill_url: str | None = None
    # Options of another router in front of the same workers. Empty: a server that was started outside.
    router_args: Sequence[str] = ()
    # Size of each KV pool, in tokens. 0: unknown, so `fill_pools` does nothing.
    pool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """System that receives requests."""

    name: str
    # CPU threads of its models, e.g. "1 + 1" for two workers.
    threads: str
    # Starts the server, yields it when it is ready, and stops it on exit. Raises SplitserveError. Progress goes to the
    # console.
    running: Callable[[Console], AbstractContextManager[Running]]


def running_server(name: str, endpoint: Endpoint, threads: str = "not known") -> Server:
    """Return a server that was started outside this benchmark."""
    return Server(name, threads, lambda console: nullcontext(Running(endpoint)))


@contextmanager
def our_cluster(
    console: Console | None,
    options: ModelBenchOptions,
    threads: int | None,
    pool_tokens: int,
    *,
    is_pair: bool,
    backend: str = "tcp",
    worker_args: Sequence[str] = (),
) -> Iterator[LocalCluster]:
    """Run a deployment of ours on this machine, one colocated worker or a pair, and yield it when it is ready.

    `threads`: of each worker. None: all cores, divided among them. `pool_tokens`: of each worker's KV pool, enough for
    the largest scenario. `worker_args`: more options of `splitserve serve` for each worker. Raises ClusterError.
    """
    own = ("--served-model-name", options.model, "--max-total-tokens", str(pool_tokens))
    deployment = LocalDeployment(
        model=options.model,
        prefill=int(is_pair),
        decode=int(is_pair),
        null=int(not is_pair),
        dtype=options.dtype,
        backend=backend,
        threads=threads or _threads_each(is_pair=is_pair),
        worker_args=[*own, *worker_args],
        log_level="warning",
    )
    with LocalCluster(deployment) as cluster:
        cluster.wait_ready(READY_TIMEOUT, console)
        yield cluster


def target_itl_args(milliseconds: float | None) -> Sequence[str]:
    """Return the options of workers with that target. None: the default."""
    return () if milliseconds is None else ("--target-itl-ms", f"{milliseconds:g}")


def _threads_each(*, is_pair: bool) -> int:
    return max(1, num_cores() // (2 if is_pair else 1))


def our_server(name: str, options: ModelBenchOptions, threads: int | None, pool_tokens: int, **how: Any) -> Server:
    """Return a server that runs `our_cluster`. Raises ClusterError when it is started."""
    is_pair = how["is_pair"]

    @contextmanager
    def running(console: Console) -> Iterator[Running]:
        with our_cluster(console, options, threads, pool_tokens, **how) as cluster:
            prefill = cluster.urls(DisaggregationMode.PREFILL)
            endpoint = Endpoint(cluster.router_url, options.model)
            yield Running(endpoint, prefill[0] if prefill else None, _router_args(cluster), pool_tokens)

    each = str(threads or _threads_each(is_pair=is_pair))
    return Server(name, " + ".join([each] * (2 if is_pair else 1)), running)


def fill_pools(running: Running, make: Callable[[int], Prompt], timeout: float = STREAM_TIMEOUT) -> None:
    """Send as many tokens of prompts as the KV pools have, because the system provides their memory on first use.

    Prefix caches then hold all pages. `make`: returns a prompt of the given length. `timeout`: seconds for all of it.
    Raises RequestFailedError.
    """
    deadline = time.monotonic() + timeout
    for _ in range(-(-running.pool_tokens // (_FILL_PROMPTS * _FILL_TOKENS))):
        prompts, left = [make(_FILL_TOKENS) for _ in range(_FILL_PROMPTS)], deadline - time.monotonic()
        if left <= 0:
            raise RequestFailedError(f"the KV pools were not full after {timeout:g} s: give them fewer tokens")
        running.endpoint.ask(prompts, 2, timeout=left)


@contextmanager
def running_router(name: str, args: Sequence[str], folder: Path) -> Iterator[ReadyInfo]:
    """Run our router, and yield where it is. Its log is in `folder`. Raises ClusterError."""
    with closing(ChildProcess(name, ["router", *args, "--port", "0"], folder)) as child:
        yield child.wait_ready(_ROUTER_TIMEOUT)


def _router_args(cluster: LocalCluster) -> list[str]:
    """Return the options that name the workers of a cluster to a router."""
    args = []
    for option, role in (("--prefill", "prefill"), ("--decode", "decode"), ("--worker", "null")):
        for child in cluster.children_of(DisaggregationMode(role)):
            assert child.ready is not None
            args += [option, child.ready.url]
            args += [str(child.ready.bootstrap_port)] if role == "prefill" else []
    return args


def transformers_server(name: str, model_folder: Path, dtype: str, threads: int) -> Server:
    """Return plain `generate` of transformers with its own cache, in a process of its own."""

    @contextmanager
    def running(console: Console) -> Iterator[Running]:
        with SecondProcess(serve_baseline, str(model_folder), dtype, threads) as process:
            yield Running(BaselineEndpoint("", name, process=process))

    return Server(name, str(threads), running)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEndpoint(Endpoint):
    """Connection to the process of `transformers_server`. `model`: name in errors."""

    process: SecondProcess

    def ask(self, prompts: Iterable[Prompt], max_tokens: int, **how: Any) -> list[StreamRecord]:
        """Run all prompts in one batch. Raises RequestFailedError."""
        try:
            self.process.send(([prompt.ids for prompt in prompts], max_tokens))
            records: list[StreamRecord] = self.process.receive(how.get("timeout", STREAM_TIMEOUT))
        except SecondProcessError as error:
            raise RequestFailedError(f"{self.model}: {error.message}") from error
        return records


class _StepClock:
    """Stopping criterion that never stops, and records when each step is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        # Reading a token waits for the device.
        input_ids[0, -1].item()
        self.times.append(time.perf_counter())
        # False for each prompt: no token id is below 0.
        return input_ids[:, 0] < 0


def run_batch(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[StreamRecord]:
    """Generate greedily with EOS suppressed, so that every prompt gets `max_tokens` tokens.

    Times are those at which `generate` has finished a step's tokens, without HTTP. Prompts of unequal length are padded
    on the left.
    """
    import torch
    from transformers import StoppingCriteriaList

    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    clock = _StepClock()
    sent_at = time.perf_counter()
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [StreamRecord(sent_at, clock.times, len(p), len(clock.times)) for p in prompts]


def serve_baseline(connection: Connection, folder: str, dtype: str, threads: int) -> None:
    """Answer messages (prompts, max_tokens) with their records until the connection is closed."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    with suppress(EOFError):
        while True:
            connection.send(run_batch(model, *connection.recv()))


def encoder_of(model_folder: Path) -> Encode:
    """Return the function that turns text into the token ids of a model."""
    return partial(Tokenizer.load(model_folder).encode, add_special_tokens=False)


def choose_backends(named: Sequence[str], default: Iterable[str], option: str, console: Console) -> list[str]:
    """Return the backends to measure. Raises ConfigError if a named one is absent.

    An absent default backend is left out with a remark on `console`.
    """
    chosen = []
    for backend in named or default:
        problem = missing(VARIANTS.get(backend, (backend, {}))[0])
        if problem is None:
            chosen.append(backend)
        elif named:
            raise ConfigError(f"{option} {backend}: {problem}")
        else:
            console.print(f"{backend}: absent: {problem}", highlight=False, markup=False)
    return chosen


class PeerUnavailableError(SplitserveError):
    """A peer cannot be installed or does not run on this machine."""

    reason = "peer_unavailable"


# The server rejects unknown fields. No token has the id -1, so that no answer ends early.
_TRANSFORMERS_BODY = {
    "ignore_eos": None,
    "return_token_ids": None,
    "generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}),
}


def _peer_endpoint(name: str, url: str, model_folder: Path) -> Endpoint:
    if name == "transformers-serve":
        return Endpoint(url, str(model_folder), prompt_as_text=True, extra_body=_TRANSFORMERS_BODY)
    return Endpoint(url, _SERVED_NAME)


def find_scripts(folder: Path | None) -> Path:
    """Return the folder with the scripts. Raises ConfigError if one is missing."""
    found = folder or DEFAULT_SCRIPTS
    missing = [name for name in PEERS if not (found / f"{name}.sh").is_file()]
    if missing:
        raise ConfigError(f"{found} has no {missing[0]}.sh: give --peers the folder bench/peers of the repository")
    return found


def peer_server(name: str, scripts: Path, model: str, model_folder: Path, dtype: str, threads: int) -> Server:
    """Return a peer with one model, as the user named it. Raises PeerUnavailableError when it is started."""
    script = str(scripts / f"{name}.sh")

    @contextmanager
    def running(console: Console) -> Iterator[Running]:
        home = cache_dir() / "peers" / name
        home.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PEER_HOME": str(home), "PEER_MODEL": model, "PEER_PYTHON": sys.executable}
        with console.status(f"{name}: installing"):
            _install(script, environment, home / "install.log")
        (port,) = free_ports(1)
        command = [script, "serve", str(model_folder), str(port), str(threads), dtype]
        url, log = f"http://127.0.0.1:{port}", home / "serve.log"
        with ExitStack() as stack:
            with console.status(f"{name}: starting, log in {log}"):
                stack.enter_context(running_peer(command, url, log, READY_TIMEOUT, environment))
            yield Running(_peer_endpoint(name, url, model_folder))

    return Server(name, str(threads), running)


def _install(script: str, environment: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [script, "install"], env=environment, stdout=output, stderr=output, timeout=_INSTALL_TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise PeerUnavailableError(f"not installed after {_INSTALL_TIMEOUT:g} s, see {log}") from error
    if code != 0:
        raise PeerUnavailableError(f"cannot be installed: {last_line(log)} (log: {log})")


@contextmanager
def running_peer(
    command: list[str], url: str, log: Path, ready_timeout: float, environment: Mapping[str, str] | None = None
) -> Iterator[ForeignServer]:
    """Run a server of others and yield its process when it is healthy. Stop it with all its processes at the end.

    Raises PeerUnavailableError if it does not run here.
    """
    log.unlink(missing_ok=True)
    with closing(ForeignServer(log.stem, command, log.parent, f"{url}/health", env=environment)) as server:
        try:
            server.wait_ready(ready_timeout, _POLL_INTERVAL)
        except ClusterError as error:
            problem = error.message.partition("\n")[0]
            raise PeerUnavailableError(f"{problem} {last_line(log)} (log: {log})") from None
        yield server


def free_ports(count: int) -> list[int]:
    sockets = [bind("127.0.0.1", 0) for _ in range(count)]
    ports = [port_of(sock) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def last_line(log: Path) -> str:
    """Return the last informative line. Skips the remarks that pip writes after the relevant line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    informative = [line for line in lines if line and not line.startswith(("WARNING", "[notice]"))]
    return informative[-1][:300] if informative else "its log is empty"
