"""`splitserve verify`: the same prompts colocated and disaggregated on this machine, compared token by token.

1. A router, a prefill, a decode and a colocated worker start as processes of their own, on free ports.
2. Every prompt is asked four times on both sides: greedy and seeded, with cold and warm prefix caches, alone and
   several at a time. Both sides are asked at the same time.
3. All processes end. The comparison is reported, and the exit code says whether the output is equal.

What counts as equal is decided in `verify_compare.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from splitserve.cluster.deployment import ONE_RANK, LocalDeployment
from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.transports import USER_BACKENDS
from splitserve.engine.sources import resolve_model
from splitserve.errors import ConfigError
from splitserve.launch.console import progress, standard_output
from splitserve.launch.fit import check_fit
from splitserve.launch.local import LocalCluster, wait_ready
from splitserve.launch.passage import PASSAGE
from splitserve.launch.shape import WorkerShape
from splitserve.launch.verify_compare import Answer, Comparison, VerifyError, VerifyReport
from splitserve.launch.verify_prompts import CHUNK_TOKENS, Prompt, built_in_prompts, read_prompts
from splitserve.launch.verify_report import render, report_object

_READY_TIMEOUT = 900.0
# Seconds for one answer.
_ANSWER_TIMEOUT = 1800.0
_AT_A_TIME = 6
# Likeliest tokens asked for at each position, for the place where two answers part.
_NUM_TOP = 5
_SEEDED_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    model: str
    dtype: str
    # None: our own prompts.
    prompts_file: Path | None
    # Of each answer, at most.
    max_tokens: int
    transfer_backend: str
    # Pages change owner in one pool instead of being copied; with shm.
    hand_over: bool
    # CPU threads of each rank; None: the cores divided fairly.
    threads: int | None
    # Of the weights of the pair, while the colocated worker keeps its own: what it costs is what is measured.
    quantization: str | None = None
    # Of the pair; the colocated worker has one rank.
    prefill_shape: WorkerShape = ONE_RANK
    decode_shape: WorkerShape = ONE_RANK

    @property
    def pair(self) -> str:
        """Its shapes in words; empty where each of the two has one rank."""
        if self.prefill_shape == self.decode_shape == ONE_RANK:
            return ""
        return f"prefill {self.prefill_shape} to decode {self.decode_shape}"


@dataclass(frozen=True, slots=True)
class Sides:
    """URLs of a deployment: the colocated worker, the router of the pair, and all workers, whose caches are flushed."""

    colocated: str
    disaggregated: str
    workers: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Round:
    """Every prompt once, on both sides."""

    pass_name: str
    # A cold round starts with empty prefix caches; a warm one finds what the round before it left.
    is_warm: bool
    at_a_time: int

    @property
    def setting(self) -> str:
        company = "alone" if self.at_a_time == 1 else f"{self.at_a_time} at a time"
        return f"{'warm' if self.is_warm else 'cold'}, {company}"

    def params(self, prompt: int, max_tokens: int) -> dict[str, Any]:
        if self.pass_name == "greedy":
            return {"temperature": 0.0, "max_new_tokens": max_tokens}
        return {"temperature": _SEEDED_TEMPERATURE, "seed": prompt, "max_new_tokens": max_tokens}


_ROUNDS = (
    _Round("greedy", is_warm=False, at_a_time=_AT_A_TIME),
    _Round("greedy", is_warm=True, at_a_time=1),
    _Round("seeded", is_warm=False, at_a_time=1),
    _Round("seeded", is_warm=True, at_a_time=_AT_A_TIME),
)


def run_verify(options: VerifyOptions, *, as_json: bool) -> int:
    """Returns the exit code: 0 where the output is equal, or a quantization is measured.

    Raises ConfigError, ClusterError, VerifyError.
    """
    if options.transfer_backend not in USER_BACKENDS:
        raise ConfigError(f"--transfer-backend {options.transfer_backend!r}: choose one of {', '.join(USER_BACKENDS)}")
    prompts = None if options.prompts_file is None else read_prompts(options.prompts_file)
    folder = resolve_model(options.model)
    for shape in (options.prefill_shape, options.decode_shape):
        check_fit(folder, options.model, tp_size=shape.tp_size, pp_size=shape.pp_size)
    report = _run(options, prompts, Console(stderr=True))
    if as_json:
        sys.stdout.write(json.dumps(report_object(report)) + "\n")
    else:
        standard_output().print(render(report))
    return 0 if report.equal or report.quantization is not None else 1


def _run(options: VerifyOptions, prompts: list[Prompt] | None, console: Console) -> VerifyReport:
    cluster = LocalCluster(
        LocalDeployment(
            model=options.model,
            null=1,
            dtype=options.dtype,
            backend=options.transfer_backend,
            hand_over=options.hand_over,
            prefill_shape=options.prefill_shape,
            decode_shape=options.decode_shape,
            threads=options.threads,
            worker_args=["--chunked-prefill-size", str(CHUNK_TOKENS)],
            pair_args=[] if options.quantization is None else ["--quantization", options.quantization],
        )
    )
    with cluster:
        wait_ready(cluster, console, _READY_TIMEOUT)
        colocated = cluster.urls(DisaggregationMode.NULL)[0]
        workers = [w.url for w in cluster.workers if w.url is not None]
        sides = Sides(colocated, cluster.router_url, workers)
        with progress(console, "comparing") as show:
            return asyncio.run(compare_sides(options, prompts, sides, show))


async def compare_sides(
    options: VerifyOptions,
    prompts: list[Prompt] | None,
    sides: Sides,
    show: Callable[[str], None],
    transport: httpx.AsyncBaseTransport | None = None,
) -> VerifyReport:
    """Ask both sides in every round. `show` gets a line of progress. Raises VerifyError."""
    async with httpx.AsyncClient(
        timeout=_ANSWER_TIMEOUT, limits=httpx.Limits(max_connections=None), transport=transport
    ) as http:
        client = _Client(http)
        colocated = sides.colocated
        dtype = (await client.get(f"{colocated}/server_info"))["dtype"]
        if prompts is None:
            text = await client.post(f"{colocated}/tokenize", {"prompt": PASSAGE, "add_special_tokens": False})
            prompts = built_in_prompts(text["tokens"], text["max_model_len"] - options.max_tokens)
        comparisons: list[Comparison] = []
        for number, this in enumerate(_ROUNDS, start=1):
            show(
                f"comparing {len(prompts)} prompts, round {number} of {len(_ROUNDS)}: {this.pass_name}, {this.setting}"
            )
            if not this.is_warm:
                await asyncio.gather(*(client.post(f"{url}/flush_cache", {}) for url in sides.workers))
            ours, theirs = await asyncio.gather(
                _ask_all(client, colocated, prompts, this, options.max_tokens),
                _ask_all(client, sides.disaggregated, prompts, this, options.max_tokens),
            )
            comparisons += [
                Comparison(i, this.pass_name, this.setting, ours[i], theirs[i]) for i in range(len(prompts))
            ]
    return VerifyReport(options.model, dtype, options.transfer_backend, comparisons, options.quantization, options.pair)


async def _ask_all(client: _Client, url: str, prompts: Sequence[Prompt], this: _Round, max_tokens: int) -> list[Answer]:
    """One side's answers, in the order of the prompts."""
    places = asyncio.Semaphore(this.at_a_time)

    async def ask(i: int) -> Answer:
        body = {**prompts[i], "sampling_params": this.params(i, max_tokens)}
        async with places:
            answer = await client.post(
                f"{url}/generate", {**body, "return_logprob": True, "top_logprobs_num": _NUM_TOP}, f"prompt {i}, "
            )
        return Answer.of(answer)

    return list(await asyncio.gather(*(ask(i) for i in range(len(prompts)))))


class _Client:
    """HTTP with our errors: VerifyError with the answer's own message where a worker refuses or is gone."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def get(self, url: str) -> dict[str, Any]:
        return await self._send("GET", url, None, "")

    async def post(self, url: str, body: dict[str, Any], what: str = "") -> dict[str, Any]:
        return await self._send("POST", url, body, what)

    async def _send(self, method: str, url: str, body: dict[str, Any] | None, what: str) -> dict[str, Any]:
        try:
            response = await self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise VerifyError(f"{what}{method} {url}: {str(error) or type(error).__name__}") from error
        if response.status_code != 200:
            raise VerifyError(f"{what}{method} {url}: HTTP {response.status_code}: {response.text[:500]}")
        parsed: dict[str, Any] = response.json()
        return parsed
