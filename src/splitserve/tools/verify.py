"""`splitserve verify`: the same prompts colocated and disaggregated on this machine, compared token by token.

1. A router, a prefill, a decode and a colocated worker start as separate processes on free ports.
2. Both sides receive every prompt four times, at the same time: greedy and seeded, with cold and warm prefix caches,
   alone and several at once.
3. All processes end. With several transports, steps 1 and 2 are repeated for each.
4. The comparison is reported. The exit code is 0 if the output is equal, 1 if it differs, 2 after any failure.

`verify_compare.py` defines what counts as equal. A prompt is a part of a /generate body: {"text": ...} or
{"input_ids": [...]}, from the user's JSONL file, or a built-in one of a critical length.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from rich.console import Console

from splitserve.core.config import ModelConfig
from splitserve.core.errors import USAGE_EXIT_CODE, OptionError, SplitserveError
from splitserve.core.options import check_ranges
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.fit import check_fit
from splitserve.engine.sources import resolve_model
from splitserve.process.console import progress, standard_output
from splitserve.tools.client import RequestFailedError, open_session, send
from splitserve.tools.options import VerifyOptions
from splitserve.tools.passage import PASSAGE, read_json_lines
from splitserve.tools.verify_compare import Comparison, Numerics, VerifiedAnswer, VerifyError
from splitserve.tools.verify_report import TransportReport, VerifyReport, render, report_object
from splitserve.transfer.transports import USER_BACKENDS, TransferBackend, missing

# Token budget of a step in the workers that verify starts. It is small, so that built-in prompts cross chunk
# boundaries.
CHUNK_TOKENS = 256
# Lengths around the boundaries of pages (16 tokens) and chunks. As many as are sent at a time.
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 100, 160, 255, 256, 257, 400, 513, 1200)
# Distance between the starts of two built-in prompts in the text, so that none is a prefix of another.
_STRIDE = 41
_READY_TIMEOUT = 900.0
# Seconds for one answer.
_ANSWER_TIMEOUT = 1800.0
_AT_A_TIME = len(LENGTHS)
# Top logprobs requested per position, to compare the rankings at the position where two answers diverge.
_NUM_TOP = 5
_SEEDED_TEMPERATURE = 0.8

Prompt = dict[str, Any]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
# Sends a body to a URL, or a GET without one, and returns the JSON of the answer. Raises RequestFailedError.
Send = Callable[..., Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Sides:
    """URLs of a deployment: the colocated worker, the router of the pair, and all workers, to flush their caches."""

    colocated: str
    disaggregated: str
    workers: Sequence[str]
    transport: str = "tcp"


@dataclass(frozen=True, slots=True)
class _Round:
    """One round: every prompt once on both sides."""

    pass_name: str
    # A cold round starts with empty prefix caches. A warm round uses what the round before it left there.
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


def run_verify(options: VerifyOptions) -> int:
    """Run all rounds and return the exit code: 0 if the output is equal, or if a quantization is measured.

    Raises ConfigError, ModelLoadError, ClusterError, VerifyError, RequestFailedError. All end the process with exit
    code 2, because 1 means a difference. So do unexpected errors, and a report that cannot be written.
    """
    try:
        report = _compare(options)
        is_written = _print(report)
    except SplitserveError as error:
        error.exit_code = USAGE_EXIT_CODE
        raise
    except Exception:
        traceback.print_exc()
        return USAGE_EXIT_CODE
    if not is_written:
        return USAGE_EXIT_CODE
    return 0 if report.equal or options.quantization is not None else 1


def _print(report: VerifyReport) -> bool:
    """Print the report on standard output. Return whether that could be written."""
    console = standard_output()
    try:
        if report.options.as_json:
            console.file.write(msgspec.json.encode(report_object(report)).decode() + "\n")
        else:
            console.print(render(report))
        console.file.flush()
    except (OSError, SystemExit):
        # rich ends the process with SystemExit if the reader of the output is gone. `cli.main` prints other causes.
        return False
    return True


def _compare(options: VerifyOptions) -> VerifyReport:
    check_ranges(options)
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    clusters = [_cluster(options, backend) for backend in _backends(options)]
    folder = resolve_model(options.model)
    for shape in options.workers.shapes:
        check_fit(folder, ModelConfig(model=options.model), shape)
    return VerifyReport(options, [_run_rounds(options, prompts, cluster) for cluster in clusters])


def _backends(options: VerifyOptions) -> tuple[str, ...]:
    """Return the transports to compare over. Raises OptionError."""
    if not options.all_transports:
        return tuple(dict.fromkeys(options.transfer_backend)) or ("tcp",)
    if options.transfer_backend or options.workers.hand_over:
        raise OptionError("--all-transports", "chooses the transports: leave out --transfer-backend and --hand-over")
    return tuple(backend for backend in USER_BACKENDS if missing(backend) is None)


def _cluster(options: VerifyOptions, backend: str) -> LocalDeployment:
    prefill_shape, decode_shape = options.workers.shapes
    pair_args = [] if options.quantization is None else ["--quantization", options.quantization]
    if options.all_transports and backend == TransferBackend.TCP:
        # Through sockets, as between hosts, because `shm` already compares direct writes.
        pair_args += ["--transfer-option", "direct=false"]
    return LocalDeployment(
        model=options.model,
        null=1,
        dtype=options.used_dtype,
        backend=backend,
        hand_over=options.workers.hand_over,
        threads=options.workers.threads,
        prefill_shape=prefill_shape,
        decode_shape=decode_shape,
        worker_args=["--chunked-prefill-size", str(CHUNK_TOKENS)],
        pair_args=pair_args,
    )


def _run_rounds(options: VerifyOptions, prompts: list[Prompt] | None, deployment: LocalDeployment) -> TransportReport:
    with LocalCluster(deployment) as cluster:
        console = Console(emoji=False, stderr=True)
        cluster.wait_ready(_READY_TIMEOUT, console)
        workers = [w.url for w in cluster.workers if w.url is not None]
        sides = Sides(cluster.urls(DisaggregationMode.NULL)[0], cluster.router_url, workers, deployment.backend)
        with progress(console, "comparing") as show:

            async def compare() -> TransportReport:
                async with open_session(_ANSWER_TIMEOUT) as session:
                    return await compare_sides(options, prompts, sides, show, partial(send, session))

            return asyncio.run(compare())


async def compare_sides(
    options: VerifyOptions, prompts: list[Prompt] | None, sides: Sides, show: Callable[[str], None], request: Send
) -> TransportReport:
    """Send the prompts of every round to both sides. `show` receives a line of progress.

    Raises VerifyError, RequestFailedError.
    """
    infos = [await request(f"{url}/server_info") for url in sides.workers]
    numerics = Numerics.of(infos, near_ties=options.near_ties)
    if prompts is None:
        text = await request(f"{sides.colocated}/tokenize", {"prompt": PASSAGE, "add_special_tokens": False})
        room = text["max_model_len"] - options.max_tokens
        prompts = built_in_prompts(text["tokens"], room)
        if not prompts:
            problem = f"leaves room for {max(0, room)} tokens of a prompt in the model's {text['max_model_len']}"
            raise OptionError("--max-tokens", f"{options.max_tokens} {problem}: give fewer")
    # The colocated answers of the first round of each pass.
    references: dict[str, list[VerifiedAnswer]] = {}
    comparisons: list[Comparison] = []
    rounds = [replace(this, at_a_time=min(this.at_a_time, len(prompts))) for this in _ROUNDS]
    for number, this in enumerate(rounds, start=1):
        progress_of_round = f"round {number} of {len(rounds)}: {this.pass_name}, {this.setting}"
        counted = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        show(f"comparing {counted} over {sides.transport}, {progress_of_round}")
        if not this.is_warm:
            await asyncio.gather(*(request(f"{url}/flush_cache", {}) for url in sides.workers))
        ours, theirs = await asyncio.gather(
            _ask_all(request, sides.colocated, prompts, this, options.max_tokens),
            _ask_all(request, sides.disaggregated, prompts, this, options.max_tokens),
        )
        expected = references.setdefault(this.pass_name, ours)
        answers = {"disaggregated": theirs} if expected is ours else {"colocated": ours, "disaggregated": theirs}
        for side, found in answers.items():
            comparisons += [
                Comparison(i, this.pass_name, this.setting, side, *pair)
                for i, pair in enumerate(zip(expected, found, strict=True))
            ]
    return TransportReport(sides.transport, numerics, comparisons)


async def _ask_all(
    request: Send, url: str, prompts: Sequence[Prompt], this: _Round, max_tokens: int
) -> list[VerifiedAnswer]:
    """Return one side's answers in the order of the prompts."""
    places = asyncio.Semaphore(this.at_a_time)

    async def ask(i: int) -> VerifiedAnswer:
        params = this.params(i, max_tokens)
        body = {**prompts[i], "sampling_params": params, "return_logprob": True, "top_logprobs_num": _NUM_TOP}
        async with places:
            try:
                return VerifiedAnswer.of(await request(f"{url}/generate", body))
            except RequestFailedError as error:
                raise VerifyError(f"prompt {i}, {error}") from error

    return list(await asyncio.gather(*(ask(i) for i in range(len(prompts)))))


class _PromptLine(msgspec.Struct):
    text: _Text | UnsetType = UNSET
    input_ids: _TokenIds | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.text is UNSET) == (self.input_ids is UNSET):
            raise ValueError("it needs either text or input_ids")


def read_prompts(path: Path) -> list[Prompt]:
    """Read lines of {"text": ...}, {"input_ids": [...]} or a JSON string. Raises ConfigError."""
    form = 'a string, {"text": "..."} or {"input_ids": [...]}'
    lines: list[Any] = read_json_lines(path, _Text | _PromptLine, "--prompts", form)
    return [{"text": line} if isinstance(line, str) else msgspec.to_builtins(line) for line in lines]


def built_in_prompts(passage_ids: Sequence[int], room: int) -> list[Prompt]:
    """Return pieces of the tokenized passage, of every length in LENGTHS up to `room`.

    The long ones repeat the passage.
    """
    prompts = []
    for i, length in enumerate(n for n in LENGTHS if n <= room):
        ids = [passage_ids[(i * _STRIDE + j) % len(passage_ids)] for j in range(length)]
        prompts.append({"input_ids": ids})
    return prompts
