"""Ranks of a model in processes of their own, driven by a manual loop: engines without schedulers.

The processes start once, because a start takes seconds, and then build one engine after the other, each sharded in its
own way. All messages go over pipes. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch

from splitserve.core.batch import LAST_SAMPLED, InputLogprobSpec, RequestStep, SampleSpec, StepPlan, StepResult
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import SplitserveError
from splitserve.core.layout import KVLayout
from splitserve.core.parallel import ParallelRank
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.parallel.dp_attention import SharedRunner
from splitserve.engine.parallel.ranks import Ranks, open_ranks
from splitserve.engine.runner import ModelRunner

PAGE_SIZE = 8
_NUM_TOKENS = 1024
_TIMEOUT = 60.0
_END = b""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, and how to compute them. Greedy."""

    prompts: tuple[tuple[int, ...], ...]
    num_new: int = 12
    # Prompt tokens in one step.
    chunk: int = 16
    # Steps in flight at one time, of different prompts.
    num_micro_batches: int = 1


class RankCase(msgspec.Struct, frozen=True, kw_only=True):
    """Model and work for a number of ranks."""

    folder: str
    # Set for each case by `RankProcesses.run`.
    init_method: str = ""
    tp_size: int = 1
    pp_size: int = 1
    pp_layers: tuple[int, ...] = ()
    dtype: str = "float32"
    expert_parallel: bool = False
    work: RankWork
    # Data parallel attention: work of each rank, in place of `work`.
    own_work: tuple[RankWork, ...] = ()
    # Rank that exits during the work, as if killed, after `num_orders_before_death` orders. -1: none.
    dying_rank: int = -1
    num_orders_before_death: int = 3

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    def rank(self, index: int) -> ParallelRank:
        return ParallelRank(
            tp_rank=index % self.tp_size, tp_size=self.tp_size, pp_rank=index // self.tp_size, pp_size=self.pp_size
        )


class RankOutcome(msgspec.Struct, kw_only=True):
    """Result of one rank. Only the driver has tokens and logprobs."""

    error: str = ""
    tokens: list[list[int]] = []
    # Logprobs of each output token, and of each prompt token but the first.
    logprobs: list[list[float]] = []
    input_logprobs: list[list[float]] = []
    layout: KVLayout | None = None
    # Float32, by component of the layout: [pages in use, page_size, heads, head_dim].
    kv: list[bytes] = []
    bytes_read: int = 0
    # Parameters of the rank's shard.
    num_parameters: int = 0


class HandLoop:
    """Manual driver of a runner: allocates rows and pages once, then computes prompts in chunks and output tokens."""

    def __init__(self, engine: BuiltEngine, work: RankWork, tell: Callable[[bytes], None] | None = None) -> None:
        self._work = work
        num_pages = engine.layout.num_pages
        self.table = np.zeros((len(work.prompts), num_pages), np.int32)
        free = np.random.default_rng(0).permutation(num_pages).tolist()
        for row, prompt in zip(self.table, work.prompts, strict=True):
            needed = -(-(len(prompt) + work.num_new) // PAGE_SIZE)
            row[:needed] = [free.pop() for _ in range(needed)]
        self.runner: ModelRunner | _Met = engine.runner(self.table, tell=tell)
        self._computed = [0] * len(work.prompts)
        self.outcome = RankOutcome(
            tokens=[[] for _ in work.prompts],
            logprobs=[[] for _ in work.prompts],
            input_logprobs=[[] for _ in work.prompts],
        )

    def run(self) -> RankOutcome:
        """Run all micro-batches in turn: each begins its next step when its last one has ended."""
        in_flight: deque[tuple[list[int], StepPlan, Callable[[], StepResult]]] = deque()
        for first in range(self._work.num_micro_batches):
            in_flight.append(self._begin(list(range(first, len(self.table), self._work.num_micro_batches))))
        while in_flight:
            rows, plan, compute = in_flight.popleft()
            self._commit(rows, plan, compute())
            rest = [row for row in rows if len(self.outcome.tokens[row]) < self._work.num_new]
            if rest:
                in_flight.append(self._begin(rest))
        return self.outcome

    def _begin(self, rows: list[int]) -> tuple[list[int], StepPlan, Callable[[], StepResult]]:
        plan = StepPlan(tuple(self._step(row) for row in rows))
        begin = self.runner.begin if self._work.num_micro_batches > 1 else self.runner.prepare
        return rows, plan, begin(plan)

    def _step(self, row: int) -> RequestStep:
        prompt, output, start = self._work.prompts[row], self.outcome.tokens[row], self._computed[row]
        end = start + 1 if output else min(start + self._work.chunk, len(prompt))
        token_ids = (LAST_SAMPLED,) if output else prompt[start:end]
        sample = scored = None
        if end >= len(prompt):
            params = ResolvedSampling(temperature=0.0, ignore_eos=True)
            sample = SampleSpec(params, end, prompt, tuple(output), return_logprob=True)
        if not output and prompt[start + 1 : end + 1]:
            scored = InputLogprobSpec(0, prompt[start + 1 : end + 1])
        return RequestStep(f"r{row}", row, token_ids, start, sample, scored)

    def _commit(self, rows: Sequence[int], plan: StepPlan, result: StepResult) -> None:
        for row, step, outcome in zip(rows, plan.requests, result.requests, strict=True):
            self._computed[row] = step.end
            self.outcome.input_logprobs[row] += [scored.logprob for scored in outcome.input_logprobs]
            if outcome.token_id is not None and outcome.logprob is not None:
                self.outcome.tokens[row].append(outcome.token_id)
                self.outcome.logprobs[row].append(outcome.logprob.logprob)


def on_one_rank(folder: Path, work: RankWork, dtype: str = "float32") -> RankOutcome:
    """Compute the work on an engine in this process."""
    engine = build_engine(_model(str(folder), dtype), _CACHE)
    with contextlib.closing(engine):
        return _described(HandLoop(engine, work).run(), engine)


_CACHE = CacheConfig(page_size=PAGE_SIZE, max_total_tokens=_NUM_TOKENS)


def _model(folder: str, dtype: str, *, expert_parallel: bool = False, dp_attention: bool = False) -> ModelConfig:
    return ModelConfig(
        model=folder,
        device="cpu",
        threads=1,
        dtype=dtype,
        expert_parallel=expert_parallel,
        dp_attention=dp_attention,
    )


def _described(outcome: RankOutcome, engine: BuiltEngine) -> RankOutcome:
    outcome.layout = engine.layout
    for component in engine.layout.components:
        side = {"k": engine.pool.keys, "v": engine.pool.values, "latent": engine.pool.latents}[component.name]
        outcome.kv.append(side[component.layer].float().numpy().tobytes())
    outcome.bytes_read = engine.loaded.share.bytes_read if engine.loaded.share else 0
    outcome.num_parameters = sum(p.numel() for p in engine.loaded.model.parameters())
    return outcome


class RankProcesses:
    """Group of `num_ranks` processes. `close` ends them."""

    def __init__(self, num_ranks: int) -> None:
        # One process imports torch and transformers. Each rank starts as a fork of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._commands: list[Connection] = []
        self._processes = []
        # Pipes into the inbox of each rank, written by every other rank.
        orders = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        for index in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(index, theirs, orders[index][0], [sending for _, sending in orders]),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._commands.append(ours)
            self._processes.append(process)

    def run(self, case: RankCase, init_file: Path) -> list[RankOutcome]:
        """Return the outcomes of the case's ranks in order; of a rank that died, one with the error "dead".

        `init_file`: a path that does not exist.
        """
        case = msgspec.structs.replace(case, init_method=init_file.as_uri())
        for connection in self._commands[: case.num_ranks]:
            connection.send_bytes(msgspec.msgpack.encode(case))
        outcomes = []
        for index, connection in enumerate(self._commands[: case.num_ranks]):
            if not connection.poll(_TIMEOUT):
                raise TimeoutError(f"rank {index} does not answer")
            try:
                outcomes.append(msgspec.msgpack.decode(connection.recv_bytes(), type=RankOutcome))
            except EOFError:
                outcomes.append(RankOutcome(error="dead"))
        return outcomes

    def close(self) -> None:
        for connection in self._commands:
            connection.close()
        for process in self._processes:
            process.join(10.0)
            if process.exitcode is None:
                process.kill()
                process.join()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _rank_main(index: int, commands: Connection, inbox: Connection, outboxes: Sequence[Connection]) -> None:
    torch.set_num_threads(1)
    for data in _messages(commands):
        case = msgspec.msgpack.decode(data, type=RankCase)
        try:
            outcome = _run_case(case, index, inbox, outboxes)
        except SplitserveError as error:
            outcome = RankOutcome(error=f"{type(error).__name__}: {error.message}")
        commands.send_bytes(msgspec.msgpack.encode(outcome))


def _run_case(case: RankCase, index: int, inbox: Connection, outboxes: Sequence[Connection]) -> RankOutcome:
    rank = case.rank(index)
    with contextlib.ExitStack() as closing:
        ranks = closing.enter_context(open_ranks(rank, case.init_method, "cpu", timeout=_TIMEOUT))
        own = bool(case.own_work)
        model = _model(case.folder, case.dtype, expert_parallel=case.expert_parallel, dp_attention=own)
        engine = closing.enter_context(
            contextlib.closing(build_engine(model, _CACHE, ranks=ranks, pp_layers=case.pp_layers))
        )
        if own:
            outcome = _drive_own(case.own_work[index], engine, ranks)
        elif rank.is_driver:
            outcome = _drive(case, engine, [outboxes[other.index] for other in rank.group() if other != rank])
        else:
            follower, num_orders = engine.follower(), 0
            while order := inbox.recv_bytes():
                if index == case.dying_rank and num_orders == case.num_orders_before_death:
                    os._exit(1)
                follower.run(order)
                num_orders += 1
            outcome = RankOutcome()
        outcome = _described(outcome, engine)
        # A barrier: no rank closes its connections while another rank still waits for it.
        ranks.least(0)
        return outcome


def _drive(case: RankCase, engine: BuiltEngine, followers: Sequence[Connection]) -> RankOutcome:
    def tell(order: bytes) -> None:
        for follower in followers:
            follower.send_bytes(order)

    try:
        return HandLoop(engine, case.work, tell).run()
    finally:
        # A follower that died does not read.
        with contextlib.suppress(OSError):
            tell(_END)


def _drive_own(work: RankWork, engine: BuiltEngine, ranks: Ranks) -> RankOutcome:
    """Run this rank's requests, and then take part in the steps of the other ranks."""
    loop = HandLoop(engine, work)
    shared = _Met(engine.shared_runner(engine.runner(loop.table)), ranks)
    loop.runner = shared
    outcome = loop.run()
    while shared.take_part():
        pass
    return outcome


class _Met:
    """Shared runner. Before each step the ranks exchange the numbers of tokens that they bring."""

    def __init__(self, runner: SharedRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        run = self._runner.prepare(plan)
        return lambda: run(self._tell(plan.num_tokens))

    begin = prepare

    def take_part(self) -> bool:
        """Take part in a step without requests of this rank. Return False if no rank has any."""
        num_tokens = self._tell(0)
        if any(num_tokens):
            self._runner.prepare(StepPlan(()))(num_tokens)
        return any(num_tokens)

    def _tell(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._ranks.gather(torch.tensor([num_tokens])).tolist())


def _messages(connection: Connection) -> Iterator[bytes]:
    """Yield messages until the other side closes the connection."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()
