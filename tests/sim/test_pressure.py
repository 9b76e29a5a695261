"""Pools too small for their requests: none starves, and no token is lost or sent twice, whatever the order.

Seeds choose pool, reserve, host memory, lengths, arrivals, priorities, aborts, deadlines and proposals, down to the
smallest pool that can work. The fake engine's tokens depend on every KV slot, so a page that came back wrong shows.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from splitserve.core.config import SchedulePolicy
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.admission import OVERTAKING_PARTS
from support.fake_engine import FakeEngine, expected_tokens
from support.guesser import RandomProposer
from support.late_followers import RankedEngine
from support.pair import PairWorld
from support.sim import ColocatedWorld, SimWorker


@dataclass
class Life:
    """The requests of a world, and those that may end early."""

    window: int | None = None
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    # May end with an abort, or be cut short by a deadline.
    excused: set[str] = field(default_factory=set)

    def check_outputs(self, worker: SimWorker) -> None:
        for rid, ask in self.asked.items():
            got, finish = worker.tokens(rid), worker.finish(rid)
            count = min(ask.params.max_new_tokens, worker.longest - len(ask.prompt_ids))
            expected = expected_tokens(ask.prompt_ids, ask.params, count, window=self.window)
            stops = [i for i, token in enumerate(expected) if token in ask.params.stop_token_ids]
            expected = expected[: stops[0] + 1] if stops else expected
            assert got == expected[: len(got)], rid
            if finish is None or finish.type is FinishType.ABORT:
                assert rid in self.excused, (rid, finish)
            else:
                assert got == expected, rid


class Watch:
    """Check of a generating worker after each turn: its accounts, and which requests overtake waiting ones."""

    def __init__(self, worker: SimWorker, *, is_fifo: bool = False) -> None:
        self._worker = worker
        # Requests must be admitted first in order of arrival, except for small ones.
        self._is_fifo = is_fifo
        self._overtakers: set[str] = set()
        self._ran: set[str] = set()
        self._line: list[str] = []
        self._num_turns = 0
        self.retractions: Counter[str] = Counter()

    def look(self) -> None:
        # Events between turns, as of the transfer, change nothing that is checked here.
        if self._worker.num_turns == self._num_turns:
            return
        self._num_turns = self._worker.num_turns
        self._worker.check()
        running = self._worker.running
        line = [r.rid for r in running.retraction.requests()]
        assert line == [r.rid for r in sorted(running.retraction.requests(), key=lambda r: r.rank)]
        admitted = {r.rid for r in self._worker.cache.holdings}
        stayed = set(line) & set(self._line)
        assert not stayed or admitted <= self._ran, f"{admitted - self._ran} overtook the retracted {stayed}"
        # Requests that ended meanwhile, by an abort or a deadline, do not count.
        before = [rid for rid in self._line if rid in admitted or rid in stayed]
        back = [rid for rid in before if rid in admitted]
        assert back == before[: len(back)], f"{back} came back before {before}"
        if self._is_fifo and running.waiting:
            first = min(r.number for r in running.waiting.values())
            holders = {r.rid: r for r in self._worker.cache.holdings}
            new = {rid for rid, r in holders.items() if rid not in self._ran and r.number > first}
            self._overtakers |= new
            held = sum(len(holders[rid].pages) for rid in self._overtakers & holders.keys())
            assert held <= self._worker.cache.pages.num_pages // OVERTAKING_PARTS
        self._ran |= admitted
        self._line = line
        for request in running.requests():
            self.retractions[request.rid] = request.num_retractions


def settings_of(rng: random.Random, page_size: int, longest: int) -> dict:
    """Of a worker that generates; its pool holds the longest request, and sometimes nothing beside it."""
    num_pages = -(-longest // page_size)
    num_pages += rng.choice([0, 1, num_pages, 3 * num_pages])
    return {
        "num_pages": num_pages,
        "page_size": page_size,
        "max_running": rng.choice([1, 3, 8, 32, 32]),
        "num_reserved_decode_tokens": rng.choice([1, 1, 2, 8, 512]),
        # None, a few pages of eight bytes a token, plenty.
        "host_memory": rng.choice([0, 5 * 8 * page_size, 1 << 20]),
        "prefix_host_memory": rng.choice([0, 3 * 8 * page_size, 1 << 20]),
        "policy": rng.choice(list(SchedulePolicy)),
        "has_priorities": rng.random() < 0.3,
        "proposer": RandomProposer(rng) if rng.random() < 0.5 else None,
        "num_draft_tokens": rng.choice([1, 4, 30]),
    }


def ask_of(rng: random.Random, number: int, longest: int) -> GenerateRequest:
    num_prompt_tokens = rng.randrange(1, rng.choice([4, 4, longest]))
    sampling = ResolvedSampling(
        max_new_tokens=rng.randrange(1, longest),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1000),
        # Of 512: every eighth token of some requests ends them.
        stop_token_ids=tuple(range(rng.choice([0, 0, 64]))),
    )
    return GenerateRequest(
        rid=f"r{number}",
        prompt_ids=[rng.randrange(3) for _ in range(num_prompt_tokens)],
        params=sampling,
        return_logprob=rng.random() < 0.3,
        priority=rng.randrange(3),
        timeout=rng.choice([0.003, 0.05]) if rng.random() < 0.1 else None,
    )


def loop_of(seed: int, loop: str) -> dict:
    """A worker's loop; every seed has steps that end at other times. The overlapped one has no draft tokens."""
    match loop:
        case "normal":
            return {}
        case "overlapped":
            return {"late_steps": random.Random(seed), "proposer": None}
        case "pipelined":
            return {"late_steps": random.Random(seed), "pp_size": 1 + seed % 4}
    raise ValueError(loop)


def colocated_life(
    seed: int, loop: str, window: int | None = None, ranks: Callable[..., RankedEngine] | None = None
) -> int:
    """Run one life of a null worker with that window in all layers. Return the number of retractions."""
    rng = random.Random(seed)
    page_size, longest = rng.choice([1, 2, 4, 16]), rng.choice([8, 24, 60, 60])
    settings = settings_of(rng, page_size, longest) | loop_of(seed, loop)
    settings["make_engine"] = partial(FakeEngine, window=window)
    if ranks is not None:
        # The prefix tier is refused beside ranks.
        settings |= {"make_engine": partial(ranks, rng=rng, window=window), "prefix_host_memory": 0}
        settings["host_memory"] *= 3
    world = ColocatedWorld(**settings, token_budget=rng.choice([1, 5, 64]), prefix=rng.random() < 0.6)
    is_fifo = settings["policy"] is SchedulePolicy.FCFS and not settings["has_priorities"]
    life, watch = Life(window), Watch(world, is_fifo=is_fifo)
    for i in range(rng.randrange(2, 40)):
        ask = ask_of(rng, i, longest)
        life.asked[ask.rid] = ask
        if ask.timeout is not None:
            life.excused.add(ask.rid)
        world.submit(ask)
        for _ in range(rng.choice([0, 0, 0, 1, 10])):
            world.turn()
            world.clock.advance(0.001)
            watch.look()
        if rng.random() < 0.15:
            victim = rng.choice(list(life.asked))
            life.excused.add(victim)
            world.submit(AbortRequest(rid=victim, quiet=rng.random() < 0.3))
    for _ in range(20_000):
        world.turn()
        world.clock.advance(0.001)
        watch.look()
        if world.is_idle():
            break
    assert world.is_idle(), world.scheduler.state()
    life.check_outputs(world)
    world.check_nothing_is_held()
    return world.scheduler.state().num_retracted_requests_total


def pair_life(seed: int, loop: str, window: int | None = None) -> int:
    """One life of a prefill and a decode worker, likewise."""
    rng = random.Random(seed)
    page_size, longest = rng.choice([1, 4, 16]), rng.choice([8, 24, 60, 60])
    prefill = {"num_pages": -(-longest // page_size) + rng.choice([0, 20]), "page_size": page_size}
    prefill["token_budget"] = [3, 16, 2048][seed % 3]
    prefill["prefix_host_memory"] = rng.choice([0, 5 * 8 * page_size, 1 << 20])
    decode = settings_of(rng, page_size, longest) | {"pre_alloc_size": rng.choice([0, 1, 8]), "prefix_host_memory": 0}
    prefill |= loop_of(seed + 1, loop)
    decode |= loop_of(seed, loop)
    prefill["make_engine"] = decode["make_engine"] = partial(FakeEngine, window=window)
    if window is not None:
        # As where roles are put together: a longer prompt's KV has not all come. On the other side sometimes none, too.
        decode["prefix"], prefill["prefix"] = False, seed % 2 == 0
    world = PairWorld(seed, prefill_settings=prefill, decode_settings=decode, num_slots=rng.choice([1, 8]))
    life, watch = Life(window), Watch(world.decode)
    for i in range(rng.randrange(2, 24)):
        ask = ask_of(rng, i, longest)
        life.asked[ask.rid] = ask
        if ask.timeout is not None:
            life.excused.add(ask.rid)
        more = {"return_logprob": ask.return_logprob, "priority": ask.priority, "timeout": ask.timeout}
        world.submit(ask.rid, ask.prompt_ids, ask.params, room=i, **more)
        for _ in range(rng.choice([0, 10, 100])):
            world.happen()
            watch.look()
        if rng.random() < 0.15:
            victim = rng.choice(list(life.asked))
            life.excused.add(victim)
            world.abort(victim, *rng.sample([world.prefill, world.decode], rng.randrange(1, 3)))
    for _ in range(200_000):
        world.happen()
        watch.look()
        if world.prefill.is_idle() and world.decode.is_idle():
            break
    assert world.decode.is_idle(), world.decode.scheduler.state()
    assert world.prefill.is_idle(), world.prefill.scheduler.state()
    life.check_outputs(world.decode)
    world.check_nothing_is_held()
    return world.decode.scheduler.state().num_retracted_requests_total


@pytest.mark.parametrize("loop", ["normal", "overlapped", "pipelined"])
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.soak) for block in (1, 2, 3))])
@pytest.mark.parametrize("life", [colocated_life, pair_life])
def test_every_request_ends_right_however_small_the_pool(life, block, loop):
    # Steps that end late take more turns.
    seeds = range(block * 50, block * 50 + 50, 1 if loop == "normal" else 2)
    num_retractions = sum(life(seed, loop) for seed in seeds)
    assert num_retractions > 5, "no pressure: this proves nothing"


@pytest.mark.parametrize("loop", ["normal", "overlapped", "pipelined"])
@pytest.mark.parametrize("window", [2, 7, 20])
@pytest.mark.parametrize("life", [colocated_life, pair_life])
@pytest.mark.parametrize("seeds", [range(200, 208), pytest.param(range(208, 260), marks=pytest.mark.soak)])
def test_so_do_those_of_models_whose_layers_all_have_windows(seeds, life, window, loop):
    for seed in seeds:
        life(seed, loop, window)


@pytest.mark.parametrize("loop", ["normal", "overlapped", "pipelined"])
def test_all_ranks_copy_a_retracted_request_or_none_does(loop):
    engines: list[RankedEngine] = []

    def ranks(*args, **more) -> RankedEngine:
        engines.append(RankedEngine(*args, failures=0.1, **more))
        return engines[-1]

    # Steps that end late take more turns.
    for seed in range(300, 360, 1 if loop == "normal" else 2):
        colocated_life(seed, loop, ranks=ranks)
        engines[-1].check_nothing_is_copied()
    assert sum(engine.followers.num_made for engine in engines) > 20
    assert sum(engine.followers.num_refused for engine in engines) > 5


@pytest.mark.soak
@pytest.mark.parametrize("loop", ["normal", "overlapped", "pipelined"])
@pytest.mark.parametrize("block", range(50))
@pytest.mark.parametrize("life", [colocated_life, pair_life])
def test_every_request_ends_right_in_ten_thousand_lives(life, block, loop):
    for seed in range(1000 + block * 100, 1100 + block * 100):
        life(seed, loop)
