"""`splitserve bench speculation`: the same requests without and with draft tokens.

1. A server without speculation answers all prompts, then a server with it. Each runs alone on this machine.
2. Acceptance is the share of draft tokens that were accepted, tokens per step the output tokens of a request in each
   step that verified draft tokens: the accepted ones and one more. Both are sums over all requests.
3. Answers that differ are counted, and set the exit code. There are none if the bits of a token do not depend on its
   batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.options import SpeculationBenchOptions
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.systems import encoder_of, our_cluster
from splitserve.tools.client import STREAM_TIMEOUT, call
from splitserve.tools.passage import text_of_option

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

    def figures(self, plain: AnswerSet) -> dict[str, Any]:
        """Return the figures, as in JSON. None: there were no draft tokens, or no steps with any."""
        per_second, per_second_plain = (sum(map(len, run.token_ids)) / run.seconds for run in (self, plain))
        steps, drafts = self.num_verify_steps, self.num_draft_tokens
        return {
            "algorithm": self.name,
            "tokens_per_second": per_second,
            "speed_up": per_second / per_second_plain,
            "draft_tokens": drafts,
            "accepted_tokens": self.num_accepted,
            "acceptance": self.num_accepted / drafts if drafts else None,
            "tokens_per_step": 1.0 + self.num_accepted / steps if steps else None,
        }


def bench_speculation(options: SpeculationBenchOptions, console: Console) -> Report:
    """Measure both servers and return the report. Raises ConfigError, ClusterError, RequestFailedError."""
    prompts = _prompts(options)
    answers = []
    for name, args in (("none", []), (options.speculative_algorithm, _worker_args(options))):
        with console.status(f"{len(prompts)} requests, speculation: {name}"):
            answers.append(_measure(name, args, options, prompts))
    return speculation_report(options, *answers)


def speculation_report(options: SpeculationBenchOptions, plain: AnswerSet, speculating: AnswerSet) -> Report:
    """Return the report about a run without and a run with speculation."""
    num_same = sum(a == b for a, b in zip(plain.token_ids, speculating.token_ids, strict=True))
    figures = [run.figures(plain) for run in (plain, speculating)]
    remarks = [f"{num_same} of {len(plain.token_ids)} answers are the same with and without draft tokens."]
    if not speculating.num_draft_tokens:
        remarks.append(
            "No draft token was proposed, so neither the answers nor the speed-up are about speculation: give another "
            "--text, or longer prompts."
        )
    return Report(
        title=f"Speculation by {options.speculative_algorithm}: {options.model}",
        setting=f"{options.mode}, {options.num_prompts} prompts of {options.input_tokens} tokens, "
        f"{options.output_tokens} output tokens each, {options.concurrency} at once, temperature {options.temperature}",
        legend=_LEGEND,
        figures={"model": options.model, "mode": options.mode, "same_answers": num_same, "runs": figures},
        tables=[ReportTable.by_row(_COLUMNS, figures)],
        remarks=remarks,
        failed=num_same < len(plain.token_ids),
    )


_COLUMNS: Cells[dict[str, Any]] = (
    ("speculation", "{algorithm}"),
    ("tokens/s", "{tokens_per_second:.1f}"),
    ("speed-up", "{speed_up:.2f}"),
    ("accepted draft tokens", "{accepted_tokens} of {draft_tokens}"),
    ("acceptance", "{acceptance:.1%}"),
    ("tokens per step", "{tokens_per_step:.2f}"),
)


def _prompts(options: SpeculationBenchOptions) -> list[list[int]]:
    """Return parts of the text, which begin at equal distances. Raises ConfigError."""
    text = text_of_option(options.text)
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
    pool_tokens = 2 * len(prompts) * (options.input_tokens + options.output_tokens) + 1024
    how: dict[str, Any] = {"is_pair": options.mode == "disaggregated", "worker_args": worker_args}
    with our_cluster(None, options, options.threads, pool_tokens, **how) as cluster:
        url = f"{cluster.router_url}/generate"
        # The first requests compile and fill caches. These prompts are not measured.
        _answers(url, [prompt[::-1] for prompt in prompts[: options.concurrency]], options)
        began = time.perf_counter()
        answers = _answers(url, prompts, options)
        seconds = time.perf_counter() - began
    metas = [answer["meta_info"] for answer in answers]
    sums = [
        sum(meta.get(f"spec_{key}", 0) for meta in metas)
        for key in ("verify_ct", "draft_token_num", "accept_token_num")
    ]
    return AnswerSet(name, seconds, [answer["output_ids"] for answer in answers], *sums)


def _answers(url: str, prompts: Sequence[Sequence[int]], options: SpeculationBenchOptions) -> list[Any]:
    """Send all prompts, `concurrency` of them at a time. Return the answers in the order of the prompts."""

    def ask(number: int, prompt: Sequence[int]) -> Any:
        sampling = {
            "max_new_tokens": options.output_tokens,
            "temperature": options.temperature,
            "sampling_seed": number,
            "ignore_eos": True,
        }
        return call(url, {"input_ids": list(prompt), "sampling_params": sampling}, timeout=STREAM_TIMEOUT)

    with ThreadPoolExecutor(options.concurrency) as pool:
        return list(pool.map(ask, range(len(prompts)), prompts))
