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
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from splitserve.core.batch import (
    LAST_SAMPLED,
    InputLogprobSpec,
    PipelinedEngine,
    RequestStep,
    SampleSpec,
    StepPlan,
    StepResult,
)
from splitserve.core.config import CacheConfig, ModelConfig, WorkerConfig
from splitserve.core.errors import SplitserveError
from splitserve.core.layout import DRAFT_PREFIX, KVLayout
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.core.parallel import ParallelRank
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.draft import PrepareJointly, ProposingRunner
from splitserve.engine.memory import BuiltEngineMemory
from splitserve.engine.parallel.ranks import open_ranks
from splitserve.engine.parallel.steps import JointOrders
from splitserve.engine.runner import ModelRunner
from splitserve.ranks.follower import Follower
from splitserve.ranks.group import RankPlace
from splitserve.ranks.group_memory import GroupMemory, exchange_over

PAGE_SIZE = 8
# Sizes of models that ranks share. Nothing divides the vocabulary.
RANK_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "max_position_embeddings": 512,
}
_NUM_TOKENS = 1024
_MODELS = ("llama", "qwen3", "mixtral", "qwen3_moe", "gemma3", "deepseek_v2", "deepseek_v3")
_TIMEOUT = 60.0
_END = b""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, and how to compute them."""

    prompts: tuple[tuple[int, ...], ...]
    num_new: int = 9
    # Prompt tokens in one step.
    chunk: int = 16
    # Steps in flight at one time, of different prompts.
    num_micro_batches: int = 1
    temperature: float = 0.0
    # Draft tokens per prompt and step, of the case's draft model.
    num_draft_tokens: int = 0
    # Whether after each step a request's pages are copied to host memory, and from there to other pages.
    moves: bool = False


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the memory of all ranks, between two runs of the work."""

    # Model to update to. Empty: release and resume `tags`.
    model: str = ""
    tags: frozenset[MemoryTag] = frozenset()


class RankCase(msgspec.Struct, frozen=True, kw_only=True):
    """Model and work for a number of ranks."""

    folder: str
    # Folder of the draft model or head. None: there is none, or the head is in the model's folder.
    draft_folder: str | None = None
    # Kind of draft head. None: there is none.
    draft_head: SpeculativeAlgorithm | None = None
    # Set for each case by `RankProcesses.run`.
    init_method: str = ""
    tp_size: int = 1
    pp_size: int = 1
    pp_layers: tuple[int, ...] = ()
    dtype: str = "float32"
    expert_parallel: bool = False
    work: RankWork
    # Data parallel attention: work of each group of ranks, in place of `work`.
    own_work: tuple[RankWork, ...] = ()
    # Rank that exits during the work, as if killed, after `num_orders_before_death` orders. -1: none.
    dying_rank: int = -1
    num_orders_before_death: int = 3
    # Changes after a first run. The outcome is that of the run after them.
    changes: tuple[RankChange, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    def rank(self, index: int) -> ParallelRank:
        return ParallelRank(
            tp_rank=index % self.tp_size, tp_size=self.tp_size, pp_rank=index // self.tp_size, pp_size=self.pp_size
        )


class RankOutcome(msgspec.Struct, kw_only=True):
    """Result of one rank. Only the driver has tokens, logprobs, hidden states and numbers of draft tokens."""

    error: str = ""
    tokens: list[list[int]] = []
    # Logprobs of each output token, and of each prompt token but the first.
    logprobs: list[list[float]] = []
    input_logprobs: list[list[float]] = []
    # Hidden state that each output token was sampled from.
    hidden_states: list[list[list[float]]] = []
    num_proposed: int = 0
    num_accepted: int = 0
    layout: KVLayout | None = None
    # Float32, by component of the layout: [pages in use, page_size, heads, head_dim].
    kv: list[bytes] = []
    bytes_read: int = 0
    # Parameters of the rank's shard.
    num_parameters: int = 0
    # Error of each change; empty: it was made.
    refusals: list[str] = []
    fingerprint: str = ""
    # Bytes of the copy of a page in host memory, on all ranks together.
    copied_bytes_per_page: int = 0


class HandLoop:
    """Manual driver of a runner: allocates rows and pages once, then computes prompts in chunks and output tokens."""

    def __init__(self, engine: BuiltEngine, work: RankWork, send_order: Callable[[bytes], None] | None = None) -> None:
        self._work = work
        num_pages = engine.layout.num_pages
        self.table = np.zeros((len(work.prompts), num_pages), np.int32)
        self._free = np.random.default_rng(0).permutation(num_pages).tolist()
        self._needed = [-(-(len(prompt) + work.num_new) // PAGE_SIZE) for prompt in work.prompts]
        for row, needed in zip(self.table, self._needed, strict=True):
            row[:needed] = [self._free.pop() for _ in range(needed)]
        self.runner: ModelRunner | ProposingRunner | _Met
        # None: there are no draft tokens.
        self.drafting: ProposingRunner | None = None
        if engine.draft is None:
            self.runner = self.model_runner = engine.runner(self.table, send_order=send_order)
        else:
            self.runner = self.drafting = engine.drafting_runner(self.table, send_order=send_order)
            self.model_runner = self.drafting.target
        self._copies = engine.copies(send_order)
        self.start_again()

    def start_again(self) -> None:
        """Compute the work from nothing in the next run, on the same pages."""
        prompts = self._work.prompts
        self._computed = [0] * len(prompts)
        self._draft_states: list[bytes | None] = [None] * len(prompts)
        self.outcome = RankOutcome(
            tokens=[[] for _ in prompts],
            logprobs=[[] for _ in prompts],
            input_logprobs=[[] for _ in prompts],
            hidden_states=[[] for _ in prompts],
        )

    def run(self) -> RankOutcome:
        """Run all micro-batches in turn: each begins its next step when its last one has ended."""
        in_flight: deque[tuple[list[int], StepPlan, Callable[[], StepResult]]] = deque()
        for first in range(self._work.num_micro_batches):
            in_flight.append(self._begin(list(range(first, len(self.table), self._work.num_micro_batches))))
        while in_flight:
            rows, plan, compute = in_flight.popleft()
            self._commit(rows, plan, compute())
            if self._work.moves:
                self._move(rows[sum(self._computed) % len(rows)])
            rest = [row for row in rows if len(self.outcome.tokens[row]) < self._work.num_new]
            if rest:
                in_flight.append(self._begin(rest))
        return self.outcome

    def _move(self, row: int) -> None:
        """Copy the request's pages to host memory, and from there to free pages. Only while no step is in flight."""
        needed = self._needed[row]
        old, new = self.table[row, :needed].tolist(), [self._free.pop() for _ in range(needed)]
        copy = self._copies.save(old)
        self._copies.restore(copy, 0, new)
        self._copies.drop(copy)
        self.table[row, :needed] = new
        self._free = old + self._free

    def _begin(self, rows: list[int]) -> tuple[list[int], StepPlan, Callable[[], StepResult]]:
        steps = [self._step(row) for row in rows]
        if self.drafting is not None:
            self._add_proposals(self.drafting, rows, steps)
        plan = StepPlan(tuple(steps))
        if self._work.num_micro_batches == 1:
            return rows, plan, self.runner.prepare(plan)
        assert isinstance(self.runner, PipelinedEngine)
        return rows, plan, self.runner.begin(plan)

    def _add_proposals(self, drafting: ProposingRunner, rows: Sequence[int], steps: list[RequestStep]) -> None:
        rooms = [self._room(row) for row in rows]
        chosen = [i for i, room in enumerate(rooms) if room > 0]
        for i, proposals in zip(
            chosen, drafting.propose([steps[i] for i in chosen], [rooms[i] for i in chosen]), strict=True
        ):
            sample = steps[i].sample
            assert sample is not None
            token_ids = [*steps[i].token_ids, *proposals]
            steps[i] = replace(steps[i], token_ids=token_ids, sample=replace(sample, proposals=proposals))

    def _room(self, row: int) -> int:
        """Return how many draft tokens the next step of a row may have."""
        num_done = len(self.outcome.tokens[row])
        return min(self._work.num_draft_tokens, self._work.num_new - num_done - 1) if num_done else 0

    def _step(self, row: int) -> RequestStep:
        prompt, output, start = self._work.prompts[row], self.outcome.tokens[row], self._computed[row]
        end = start + 1 if output else min(start + self._work.chunk, len(prompt))
        last = LAST_SAMPLED if self.drafting is None else output[-1] if output else 0
        token_ids = (last,) if output else prompt[start:end]
        sample = scored = None
        if end >= len(prompt):
            params = ResolvedSampling(temperature=self._work.temperature, seed=row, ignore_eos=True)
            sample = SampleSpec(params, end, prompt, tuple(output), return_logprob=True, return_hidden_state=True)
        if not output and prompt[start + 1 : end + 1]:
            scored = InputLogprobSpec(0, prompt[start + 1 : end + 1])
        following = prompt[end] if sample is None else None
        return RequestStep(f"r{row}", row, token_ids, start, sample, scored, following, self._draft_states[row])

    def _commit(self, rows: Sequence[int], plan: StepPlan, result: StepResult) -> None:
        for row, step, outcome in zip(rows, plan.requests, result.requests, strict=True):
            proposals = step.sample.proposals if step.sample else ()
            self._computed[row] = step.end - len(proposals) + outcome.num_accepted
            self._draft_states[row] = outcome.draft_state or self._draft_states[row]
            self.outcome.num_proposed += len(proposals)
            self.outcome.num_accepted += outcome.num_accepted
            self.outcome.input_logprobs[row] += [scored.logprob for scored in outcome.input_logprobs]
            if outcome.token_id is not None and outcome.logprob is not None:
                self.outcome.tokens[row] += [*proposals[: outcome.num_accepted], outcome.token_id]
                logprobs = (*outcome.accepted_logprobs, outcome.logprob)
                self.outcome.logprobs[row] += [found.logprob for found in logprobs]
            self.outcome.hidden_states[row] += [
                np.frombuffer(state, np.float32).tolist() for state in outcome.hidden_states
            ]


def save_random_model(config: Any, folder: Path, seed: int = 0) -> None:
    """Save a model with random weights, also random biases, which transformers sets to zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def on_one_rank(
    folder: Path,
    work: RankWork,
    dtype: str = "float32",
    *,
    draft_folder: Path | None = None,
    draft_head: SpeculativeAlgorithm | None = None,
) -> RankOutcome:
    """Compute the work on an engine in this process. The draft model or head: as in RankCase."""
    draft_model = None if draft_folder is None else str(draft_folder)
    engine = build_engine(_model(str(folder), dtype), _CACHE, draft_model=draft_model, draft_head=draft_head)
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
        name = component.name.removeprefix(DRAFT_PREFIX)
        pool = engine.pool if name == component.name else engine.pool.draft_token_to_kv_pool
        side = {"k": pool.keys, "v": pool.values, "latent": pool.latents}[name]
        outcome.kv.append(side[component.layer].float().numpy().tobytes())
    outcome.bytes_read = engine.loaded.share.bytes_read if engine.loaded.share else 0
    outcome.num_parameters = sum(p.numel() for p in engine.loaded.model.parameters())
    page_bytes = engine.page_bytes_of_ranks or engine.pool.page_bytes
    outcome.copied_bytes_per_page = page_bytes.full + page_bytes.windowed
    return outcome


class RankProcesses:
    """Group of `num_ranks` processes. `close` ends them."""

    def __init__(self, num_ranks: int) -> None:
        # One process imports torch, transformers and most models of tests. Each rank starts as a fork of it.
        context = multiprocessing.get_context("forkserver")
        models = [f"transformers.models.{name}.modeling_{name}" for name in _MODELS]
        context.set_forkserver_preload([__name__, *models])
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
        if outcome.error and case.dying_rank >= 0:
            # As in a worker: the end of the process closes its connections, on which other ranks may still wait.
            return


def _run_case(case: RankCase, index: int, inbox: Connection, outboxes: Sequence[Connection]) -> RankOutcome:
    rank, own = case.rank(index), bool(case.own_work)
    with contextlib.ExitStack() as closing:
        ranks = closing.enter_context(
            open_ranks(rank, case.init_method, "cpu", timeout=_TIMEOUT, num_groups=len(case.own_work))
        )
        drivers = dist.new_group(list(range(0, case.num_ranks, case.num_ranks // len(case.own_work)))) if own else None
        model = _model(case.folder, case.dtype, expert_parallel=case.expert_parallel, dp_attention=own)
        engine = closing.enter_context(
            contextlib.closing(
                build_engine(
                    model,
                    _CACHE,
                    ranks=ranks,
                    pp_layers=case.pp_layers,
                    draft_model=case.draft_folder,
                    draft_head=case.draft_head,
                )
            )
        )
        group = ranks.group or ranks
        others = _others_of(group.rank, outboxes)
        if own and group.rank.is_driver:
            outcome = _drive_own(case.own_work[group.rank.dp_rank], engine, drivers, others)
        elif group.rank.is_driver:
            outcome = _drive(case, engine, others)
        else:
            # It opens no KV transfer, so it needs no channel.
            follower, num_orders = Follower(WorkerConfig(), engine, RankPlace(), cast("Any", None)), 0
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


def _others_of(rank: ParallelRank, outboxes: Sequence[Connection]) -> list[Connection]:
    """Return the pipes into the inboxes of the other ranks of a rank's group."""
    first = rank.dp_rank * rank.group_size
    return [outboxes[first + other.index] for other in rank.group() if other != rank]


@contextlib.contextmanager
def _order_pipes(followers: Sequence[Connection]) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that sends an order to each follower. Send the last one at the end."""

    def send_order(order: bytes) -> None:
        for follower in followers:
            follower.send_bytes(order)

    try:
        yield send_order
    finally:
        # A follower that died does not read.
        with contextlib.suppress(OSError):
            send_order(_END)


def _drive(case: RankCase, engine: BuiltEngine, followers: Sequence[Connection]) -> RankOutcome:
    with _order_pipes(followers) as send_order:
        loop = HandLoop(engine, case.work, send_order)
        if not case.changes:
            return loop.run()
        assert engine.ranks is not None
        memory = GroupMemory(BuiltEngineMemory(engine), send_order, exchange_over(engine))
        loop.run()
        refusals = [_refusal(memory, change) for change in case.changes]
        loop.start_again()
        outcome = loop.run()
        outcome.refusals, outcome.fingerprint = refusals, memory.fingerprint
        return outcome


def _refusal(memory: GroupMemory, change: RankChange) -> str:
    """Make a change and return its error. Empty: it was made."""
    try:
        if change.model:
            memory.load(WeightsSource(change.model))
            # As if the role could not be opened, and then again.
            memory.use()
            memory.undo()
            memory.use()
            memory.confirm()
        else:
            memory.release(change.tags)
            assert memory.released == change.tags
            memory.resume(change.tags)
    except SplitserveError as error:
        return error.message
    assert not memory.released
    return ""


def _drive_own(work: RankWork, engine: BuiltEngine, drivers: Any, followers: Sequence[Connection]) -> RankOutcome:
    """Run this group's requests, and then take part in the steps of the other groups."""
    with _order_pipes(followers) as send_order:
        orders = JointOrders(send_order) if followers else None
        loop = HandLoop(engine, work, orders.hold if orders else None)
        prepare = engine.shared_runner(loop.model_runner, orders).prepare
        loop.runner = shared = _Met(loop.drafting.after(prepare) if loop.drafting else prepare, drivers)
        outcome = loop.run()
        while shared.take_part():
            pass
        return outcome


class _Met:
    """Shared runner of a group. Before each step the groups exchange the numbers of tokens that they bring."""

    def __init__(self, prepare: PrepareJointly, drivers: Any) -> None:
        self._prepare = prepare
        self._drivers = drivers

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        run = self._prepare(plan)
        return lambda: run(self._exchange_sizes(plan.num_tokens))

    begin = prepare

    def take_part(self) -> bool:
        """Take part in a step without requests of this rank. Return False if no rank has any."""
        num_tokens = self._exchange_sizes(0)
        if any(num_tokens):
            self._prepare(StepPlan(()))(num_tokens)
        return any(num_tokens)

    def _exchange_sizes(self, num_tokens: int) -> tuple[int, ...]:
        found = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(self._drivers))]
        dist.all_gather(found, torch.tensor([num_tokens]), group=self._drivers)
        return tuple(int(number) for number in found)


def _messages(connection: Connection) -> Iterator[bytes]:
    """Yield messages until the other side closes the connection."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()
