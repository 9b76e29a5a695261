"""Requests that a decode worker serves alone, beside those that come from a prefill worker."""

from __future__ import annotations

import random
from typing import Any

import pytest

from splitserve.core.config import SchedulePolicy
from splitserve.core.messages import GenerateRequest, TokenOutput
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.steps import WaitReason
from support.fake_engine import expected_tokens
from support.fake_grammar import multiples
from support.guesser import RandomProposer
from support.pair import PairWorld
from support.sim import ColocatedWorld, SimWorker

GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)
PROMPT = list(range(100))


def happen_until(world: PairWorld, condition: Any) -> None:
    for _ in range(20_000):
        if condition():
            return
        world.happen()
    raise AssertionError("it did not come to pass")


def test_a_prompt_without_a_room_is_computed_on_decode_and_prefill_hears_nothing() -> None:
    world = PairWorld(1, decode_settings={"token_budget": 64, "prompt_budget": 24})
    world.submit_local("a", PROMPT, GREEDY)
    world.run_until_idle()
    assert world.decode.tokens("a") == expected_tokens(PROMPT, GREEDY, 8)
    assert world.decode.fake_engine.step_sizes == [24, 24, 24, 24, 4] + [1] * 7
    assert world.prefill.fake_engine.step_sizes == []
    assert world.decode.scheduler.state().num_local_prefill_reqs_total == 1
    world.check_nothing_is_held()


def test_streams_go_on_beside_a_long_prompt_a_bounded_chunk_at_a_time() -> None:
    world = PairWorld(2, decode_settings={"prompt_budget": 5})
    long = ResolvedSampling(max_new_tokens=40, temperature=0.0)
    for room in range(3):
        world.submit(f"s{room}", [room] * 8, long, room=room)
    happen_until(world, lambda: all(world.decode.tokens(f"s{room}") for room in range(3)))
    begun = len(world.decode.fake_engine.step_sizes)
    num_sent = sum(len(world.decode.tokens(f"s{room}")) for room in range(3))
    for i in range(3):
        world.submit_local(f"l{i}", PROMPT[i : i + 20], GREEDY)
    happen_until(world, lambda: all(world.decode.tokens(f"l{i}") for i in range(3)))
    sizes = world.decode.fake_engine.step_sizes[begun:]
    # Every step has a token of each stream, and of all prompts together no more than the bound.
    assert len(sizes) >= 3 * 20 // 5
    assert all(3 <= size <= 5 + 6 for size in sizes)
    assert sum(len(world.decode.tokens(f"s{room}")) for room in range(3)) - num_sent >= 3 * (3 * 20 // 5 - 1)
    world.run_until_idle()
    world.check_nothing_is_held()


@pytest.mark.parametrize("first", ["local", "paired"])
def test_what_one_kind_computed_the_other_finds_in_the_prefix_cache(first: str) -> None:
    world = PairWorld(3)

    def submit(kind: str, rid: str) -> None:
        if kind == "local":
            world.submit_local(rid, PROMPT, GREEDY)
        else:
            world.submit(rid, PROMPT, GREEDY, room=7)

    submit(first, "one")
    world.run_until_idle()
    sizes = len(world.decode.fake_engine.step_sizes)
    submit("paired" if first == "local" else "local", "two")
    world.run_until_idle()
    assert world.decode.tokens("one") == world.decode.tokens("two")
    if first == "paired":
        assert world.decode.cached("two") == 96
        assert world.decode.fake_engine.step_sizes[sizes] == 4
    else:
        (stats,) = [output.transfer for output in world.prefill.outputs["two"] if output.transfer is not None]
        (whole,) = [output.transfer for output in paired_alone(PROMPT) if output.transfer is not None]
        assert whole.num_bytes - stats.num_bytes == 6 * world.decode.engine.bytes_per_page
    world.check_nothing_is_held()


def paired_alone(prompt: list[int]) -> list[TokenOutput]:
    world = PairWorld(3)
    world.submit("two", prompt, GREEDY, room=7)
    world.run_until_idle()
    return world.prefill.outputs["two"]


def outcome(worker: SimWorker, rid: str) -> Any:
    logprobs = [logprob for output in worker.outputs[rid] for logprob in output.logprobs]
    return worker.tokens(rid), logprobs, worker.input_logprobs(rid), worker.finish(rid)


@pytest.mark.parametrize("given", [[], [3, 7]])
@pytest.mark.parametrize("grammar", [None, multiples(3, 7)])
def test_logprobs_grammars_and_output_of_others_are_as_in_a_colocated_worker(grammar: Any, given: list[int]) -> None:
    if grammar is not None:
        given = [6, 9][: len(given)]
    params = ResolvedSampling(max_new_tokens=8, temperature=1.0, seed=5, grammar=grammar)
    asked: dict[str, Any] = {"return_logprob": True, "num_top_logprobs": 2, "logprob_start": 0, "output_ids": given}
    colocated = ColocatedWorld(token_budget=16)
    pair = PairWorld(4, decode_settings={"prompt_budget": 16})
    pair.submit_local("r", PROMPT, params, **asked)
    pair.run_until_idle()
    colocated.submit(GenerateRequest(rid="r", prompt_ids=PROMPT, params=params, **asked))
    colocated.run_until_idle()
    assert outcome(pair.decode, "r") == outcome(colocated, "r")
    assert [t.token_id for t in pair.decode.input_logprobs("r")] == PROMPT[1:]
    pair.check_nothing_is_held()


def test_a_local_prompt_that_came_first_is_not_passed_by_prompts_of_prefill() -> None:
    """It needs most of the pool; those that come after it would fit, one by one, for ever."""
    settings = {"num_pages": 16, "page_size": 4, "num_reserved_decode_tokens": 1}
    world = PairWorld(5, decode_settings=settings)
    short = ResolvedSampling(max_new_tokens=12, temperature=0.0)
    for i in range(3):
        world.submit(f"s{i}", [i] * 6, short, room=i)
    happen_until(world, lambda: world.decode.tokens("s0"))
    world.submit_local("long", list(range(48)), GREEDY)
    for i in range(3, 30):
        world.submit(f"s{i}", [i] * 6, short, room=i)
    happen_until(world, lambda: world.decode.finish("long") is not None)
    assert sum(world.decode.finish(f"s{i}") is not None for i in range(30)) < 12
    world.run_until_idle()
    world.check_nothing_is_held()


def test_a_prompt_of_prefill_that_came_first_is_not_passed_by_local_ones() -> None:
    settings = {"num_pages": 16, "page_size": 4, "num_reserved_decode_tokens": 1}
    world = PairWorld(6, decode_settings=settings)
    short = ResolvedSampling(max_new_tokens=12, temperature=0.0)
    for i in range(3):
        world.submit_local(f"s{i}", [i] * 6, short)
    happen_until(world, lambda: world.decode.tokens("s0"))
    world.submit("long", list(range(48)), GREEDY, room=1)
    happen_until(world, lambda: world.decode.role.first_without_room is not None)
    for i in range(3, 30):
        world.submit_local(f"s{i}", [i] * 6, short)
    happen_until(world, lambda: world.decode.finish("long") is not None)
    assert sum(world.decode.finish(f"s{i}") is not None for i in range(30)) < 12
    world.run_until_idle()
    world.check_nothing_is_held()


@pytest.mark.parametrize("short_is_local", [True, False])
@pytest.mark.parametrize("long_is_local", [True, False])
def test_short_prompts_do_not_wait_behind_a_long_one_without_room(short_is_local: bool, long_is_local: bool) -> None:
    world = PairWorld(9, decode_settings={"num_pages": 64, "page_size": 4, "num_reserved_decode_tokens": 4})

    def submit(rid: str, prompt: list[int], params: ResolvedSampling, room: int, is_local: bool) -> None:
        if is_local:
            world.submit_local(rid, prompt, params)
        else:
            world.submit(rid, prompt, params, room=room)

    submit("running", PROMPT, ResolvedSampling(max_new_tokens=60, temperature=0.0), 0, False)
    happen_until(world, lambda: world.decode.tokens("running"))
    submit("long", PROMPT[::-1] + PROMPT[:60], GREEDY, 1, long_is_local)
    happen_until(world, lambda: world.decode.role.waiting_reason() is WaitReason.KV_POOL)
    for i in range(3):
        submit(f"short{i}", [i] * 6, GREEDY, 2 + i, short_is_local)
    happen_until(world, lambda: all(world.decode.finish(f"short{i}") for i in range(3)))
    assert world.decode.finish("running") is None
    assert world.decode.tokens("long") == []
    world.run_until_idle()
    assert world.decode.tokens("long") == expected_tokens(PROMPT[::-1] + PROMPT[:60], GREEDY, 8)
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(4))
def test_a_long_prompt_runs_although_short_ones_never_cease(seed: int) -> None:
    world = PairWorld(seed, decode_settings={"num_pages": 64, "page_size": 4, "num_reserved_decode_tokens": 4})
    world.submit("running", PROMPT, ResolvedSampling(max_new_tokens=20, temperature=0.0), room=0)
    happen_until(world, lambda: world.decode.tokens("running"))
    world.submit("long", PROMPT[::-1] + PROMPT[:60], GREEDY, room=1)
    happen_until(world, lambda: world.decode.role.first_without_room is not None)
    count = 0
    while world.decode.finish("long") is None:
        if count - sum(world.decode.finish(f"s{i}") is not None for i in range(count)) < 20:
            world.submit_local(f"s{count}", [count] * 6, GREEDY)
            count += 1
        world.happen()
    assert count > 20
    assert sum(world.decode.finish(f"s{i}") is not None for i in range(count)) > 0
    world.run_until_idle()
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(4))
def test_a_local_prompt_gets_a_running_place_beside_ceaseless_prompts_of_prefill(seed: int) -> None:
    """It waits for a place, not for pages: overtaking would gain nothing, and would go on for ever."""
    settings = {"num_pages": 256, "page_size": 4, "num_reserved_decode_tokens": 4, "max_running": 2}
    world = PairWorld(seed, decode_settings=settings, num_slots=16)
    params = ResolvedSampling(max_new_tokens=16, temperature=0.0)
    count = 0

    def keep_busy() -> int:
        nonlocal count
        finished = sum(world.decode.finish(f"s{i}") is not None for i in range(count))
        for i in range(count, finished + 8):
            world.submit(f"s{i}", [i] * 6, params, room=i)
        count = finished + 8
        return finished

    keep_busy()
    happen_until(world, lambda: world.decode.running.prebuilt)
    before = keep_busy()
    world.submit_local("local", [7] * 6, params)
    happen_until(world, lambda: keep_busy() > before + 30 or world.decode.finish("local") is not None)
    assert world.decode.finish("local") is not None
    world.run_until_idle()
    world.check_nothing_is_held()


@pytest.mark.parametrize("host_memory", [0, 1 << 20])
def test_long_answers_overtake_no_prompt_that_they_would_delay(host_memory: int) -> None:
    """They fit when they are admitted, and would fill the pool later."""
    settings = {"num_pages": 200, "page_size": 1, "num_reserved_decode_tokens": 1, "host_memory": host_memory}
    world = PairWorld(10, decode_settings=settings | {"prefix": False}, num_slots=64)
    world.submit("running", PROMPT, ResolvedSampling(max_new_tokens=50, temperature=0.0), room=0)
    happen_until(world, lambda: world.decode.tokens("running"))
    world.submit("long", PROMPT[:60], GREEDY, room=1)
    happen_until(world, lambda: world.decode.role.first_without_room is not None)
    for i in range(30):
        world.submit_local(f"s{i}", [i] * 3, ResolvedSampling(max_new_tokens=60, temperature=0.0))
    overtook: set[str] = set()
    while "long" not in (admitted := {r.rid for r in world.decode.cache.holdings}):
        overtook |= admitted - {"running"}
        world.happen()
    assert overtook == set()
    world.run_until_idle()
    world.check_nothing_is_held()


def test_an_older_prompt_does_not_wait_behind_a_younger_one_that_may_not_overtake() -> None:
    settings = {"num_pages": 256, "page_size": 4, "num_reserved_decode_tokens": 4, "policy": SchedulePolicy.SPF}
    world = PairWorld(11, decode_settings=settings)
    world.submit("running", PROMPT, ResolvedSampling(max_new_tokens=200, temperature=0.0), room=1)
    happen_until(world, lambda: world.decode.tokens("running"))
    world.submit("older", PROMPT[:40], GREEDY, room=2)
    # Nearly the whole pool: nothing overtakes it.
    world.submit_local("large", PROMPT * 10, GREEDY)
    world.submit("younger", PROMPT[:8], GREEDY, room=3)
    world.decode.turn()
    for _ in range(1000):
        # Both handshakes end before the decode worker takes its next turn.
        world.prefill.turn()
        world.prefill.manager.tick()
        world.decode.manager.tick()
        world.happen_between(world.rng.randrange(4, 8))
    happen_until(world, lambda: world.decode.tokens("older"))
    assert world.decode.finish("running") is None
    assert world.decode.tokens("younger") == []
    world.run_until_idle()
    world.check_nothing_is_held()


def test_who_has_to_give_way_and_has_no_copy_is_computed_again_here() -> None:
    tight = {"num_pages": 12, "page_size": 4, "num_reserved_decode_tokens": 1, "host_memory": 0}
    world = PairWorld(7, decode_settings=tight)
    params = ResolvedSampling(max_new_tokens=24, temperature=0.0)
    for rid in "ab":
        world.submit_local(rid, [ord(rid)] * 8, params)
    world.run_until_idle()
    for rid in "ab":
        assert world.decode.tokens(rid) == expected_tokens([ord(rid)] * 8, params, 24)
    assert world.decode.scheduler.state().num_retracted_requests_total > 0
    assert world.prefill.fake_engine.step_sizes == []
    world.check_nothing_is_held()


@pytest.mark.parametrize("moment", ["waiting", "in its prompt", "decoding"])
def test_an_abort_ends_a_local_request_wherever_it_is(moment: str) -> None:
    world = PairWorld(8, decode_settings={"prompt_budget": 16})
    world.submit_local("a", PROMPT, GREEDY)
    if moment == "in its prompt":
        happen_until(world, lambda: world.decode.fake_engine.step_sizes)
    elif moment == "decoding":
        happen_until(world, lambda: world.decode.tokens("a"))
    world.abort("a", world.decode)
    world.run_until_idle()
    finish = world.decode.finish("a")
    assert finish is not None
    assert finish.status_code == 499
    world.check_nothing_is_held()


def random_lives(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    proposes = rng.random() < 0.3
    world = PairWorld(
        seed,
        prefill_settings={"num_pages": 100, "page_size": page_size, "token_budget": rng.choice([3, 16, 256])},
        decode_settings={
            "num_pages": rng.choice([12, 24, 100]),
            "page_size": page_size,
            "token_budget": rng.choice([16, 256]),
            "prompt_budget": rng.choice([1, 5, 16]),
            "max_running": rng.choice([2, 8]),
            "num_reserved_decode_tokens": rng.choice([1, 8, 512]),
            "host_memory": rng.choice([0, 1 << 20]),
            "prefix": rng.random() < 0.8,
            "pre_alloc_size": rng.choice([1, 8]),
            "proposer": RandomProposer(random.Random(seed)) if proposes else None,
            "late_steps": random.Random(seed) if rng.random() < 0.5 and not proposes else None,
        },
        num_slots=rng.choice([1, 3, 16]),
    )
    longest = min(world.prefill.longest, world.decode.longest)
    asked: dict[str, tuple[list[int], ResolvedSampling]] = {}
    local: set[str] = set()
    aborted: set[str] = set()
    for i in range(14):
        rid, length = f"r{i}", rng.randrange(1, longest)
        prompt = [rng.randrange(3) for _ in range(length)]
        params = ResolvedSampling(max_new_tokens=rng.randrange(1, 30), temperature=rng.choice([0.0, 1.0]), seed=i)
        if rng.random() < 0.5:
            local.add(rid)
            world.submit_local(rid, prompt, params)
        else:
            world.submit(rid, prompt, params, room=i)
        asked[rid] = prompt, params
        for _ in range(rng.randrange(60)):
            world.happen()
        if rng.random() < 0.3:
            victim = rng.choice(list(asked))
            aborted.add(victim)
            world.abort(victim, *rng.sample([world.prefill, world.decode], rng.randrange(1, 3)))
        world.prefill.check()
        world.decode.check()
    world.run_until_idle()
    for rid, (prompt, params) in asked.items():
        finish, got = world.decode.finish(rid), world.decode.tokens(rid)
        assert finish is not None
        assert (world.prefill.finish(rid) is None) is (rid in local)
        expected = expected_tokens(prompt, params, min(params.max_new_tokens, world.decode.longest - len(prompt)))
        assert got == expected[: len(got)]
        if finish.type is FinishType.ABORT:
            assert rid in aborted
        else:
            assert got == expected
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_of_both_kinds_end_right(seed: int) -> None:
    random_lives(seed)
