"""`splitserve bench speculation`: the same requests without and with draft tokens.

1. A server without speculation answers all prompts, then a server with it. Each runs alone on this machine.
2. Acceptance is the share of draft tokens that were accepted, tokens per step the output tokens of a request in each
   step that verified draft tokens: the accepted ones and one more. Both are sums over all requests.
3. Answers that differ are counted. There are none if the bits of a token do not depend on its batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from splitserve.core.errors import ConfigError, clause
from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.options import SpeculationBenchOptions
from splitserve.tools.bench.report import OthersWatch, Report, ReportTable
from splitserve.tools.bench.systems import READY_TIMEOUT, encoder_of, our_cluster
from splitserve.tools.client import open_session, send
from splitserve.tools.passage import PASSAGE

_LEGEND = (
    "Acceptance: accepted draft tokens over all draft tokens. Tokens per step: of a request, in each step that "
    "verified draft tokens."
)


@dataclass(frozen=True, slots=True)
class AnswerSet:
    """Answers of one server to all prompts."""

    name: str
    seconds: float
    token_ids: Sequence[Sequence[int]]
    # Sums over all requests: steps that verified draft tokens, draft tokens, and accepted ones.
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def acceptance(self) -> float | None:
        """Return the share of accepted draft tokens. None: there were no draft tokens."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        return 1.0 + self.num_accepted / self.num_verify_steps if self.num_verify_steps else None


def bench_speculation(options: SpeculationBenchOptions, console: Console) -> Report:
    """Measure both servers and return the report. Raises ConfigError, ClusterError, RequestFailedError."""
    others = OthersWatch()
    prompts = _prompts(options)
    answers = []
    for name, args in (("none", []), (options.speculative_algorithm, _worker_args(options))):
        with console.status(f"{len(prompts)} requests, speculation: {name}"):
            answers.append(_measure(name, args, options, prompts))
    return speculation_report(options, answers[0], answers[1], others.cores_taken())


def speculation_report(
    options: SpeculationBenchOptions, plain: AnswerSet, speculating: AnswerSet, cores_taken: float
) -> Report:
    """Return the report about a run without and a run with speculation."""
    both = (plain, speculating)
    num_same = sum(a == b for a, b in zip(plain.token_ids, speculating.token_ids, strict=True))
    figures = [
        {
            "algorithm": run.name,
            "tokens_per_second": run.tokens_per_second,
            "speed_up": run.tokens_per_second / plain.tokens_per_second,
            "draft_tokens": run.num_draft_tokens,
            "accepted_tokens": run.num_accepted,
            "acceptance": run.acceptance,
            "tokens_per_step": run.tokens_per_step,
        }
        for run in both
    ]
    rows = [
        [
            run.name,
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{run.num_accepted} of {run.num_draft_tokens}",
            "-" if run.acceptance is None else f"{run.acceptance:.1%}",
            "-" if run.tokens_per_step is None else f"{run.tokens_per_step:.2f}",
        ]
        for run in both
    ]
    header = ["speculation", "tokens/s", "speed-up", "accepted draft tokens", "acceptance", "tokens per step"]
    return Report(
        title=f"Speculation by {options.speculative_algorithm}: {options.model}",
        setting=f"{options.mode}, {options.num_prompts} prompts of {options.input_tokens} tokens, "
        f"{options.output_tokens} output tokens each, {options.concurrency} at once, temperature {options.temperature}",
        cores_taken_by_others=cores_taken,
        legend=_LEGEND,
        figures={"model": options.model, "mode": options.mode, "same_answers": num_same, "runs": figures},
        tables=[ReportTable(header, rows)],
        remarks=[f"{num_same} of {len(plain.token_ids)} answers are the same with and without draft tokens."],
    )


def _prompts(options: SpeculationBenchOptions) -> list[list[int]]:
    """Return parts of the text, which begin at equal distances. Raises ConfigError."""
    try:
        text = PASSAGE if options.text is None else options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {options.text} cannot be read ({clause(error)}): name a UTF-8 file") from error
    ids = list(encoder_of(resolve_model(options.model))(text))
    spare = len(ids) - options.input_tokens
    if spare < options.num_prompts - 1:
        raise ConfigError(f"the text has {len(ids)} tokens, too few for these prompts: give a longer --text")
    starts = [spare * i // max(1, options.num_prompts - 1) for i in range(options.num_prompts)]
    return [ids[start : start + options.input_tokens] for start in starts]


def _worker_args(options: SpeculationBenchOptions) -> list[str]:
    args = ["--speculative-algorithm", str(options.speculative_algorithm)]
    args += ["--speculative-num-draft-tokens", str(options.speculative_num_draft_tokens)]
    draft_model = options.speculative_draft_model
    return args if draft_model is None else [*args, "--speculative-draft-model", str(Path(draft_model))]


def _measure(
    name: str, worker_args: Sequence[str], options: SpeculationBenchOptions, prompts: Sequence[Sequence[int]]
) -> AnswerSet:
    is_pair = options.mode == "disaggregated"
    threads = options.threads or max(1, num_cores() // (2 if is_pair else 1))
    pool_tokens = 2 * len(prompts) * (options.input_tokens + options.output_tokens) + 1024
    cluster = our_cluster(
        options.model, options.dtype, threads, pool_tokens, is_pair=is_pair, worker_args=list(worker_args)
    )
    with cluster:
        cluster.wait_ready(READY_TIMEOUT)
        url = f"{cluster.router_url}/generate"
        # The first requests compile and fill caches. These prompts are not measured.
        asyncio.run(_answers(url, [prompt[::-1] for prompt in prompts[: options.concurrency]], options))
        began = time.perf_counter()
        answers = asyncio.run(_answers(url, prompts, options))
        seconds = time.perf_counter() - began
    metas = [answer["meta_info"] for answer in answers]
    sums = [
        sum(meta.get(f"spec_{key}", 0) for meta in metas)
        for key in ("verify_ct", "draft_token_num", "accept_token_num")
    ]
    return AnswerSet(name, seconds, [answer["output_ids"] for answer in answers], *sums)


async def _answers(url: str, prompts: Sequence[Sequence[int]], options: SpeculationBenchOptions) -> list[Any]:
    """Send all prompts, `concurrency` of them at a time. Return the answers in the order of the prompts."""
    places = asyncio.Semaphore(options.concurrency)

    async def answer(session: aiohttp.ClientSession, number: int) -> Any:
        sampling = {
            "max_new_tokens": options.output_tokens,
            "temperature": options.temperature,
            "sampling_seed": number,
            "ignore_eos": True,
        }
        async with places:
            return await send(session, url, {"input_ids": list(prompts[number]), "sampling_params": sampling})

    async with open_session() as session:
        return list(await asyncio.gather(*(answer(session, i) for i in range(len(prompts)))))
