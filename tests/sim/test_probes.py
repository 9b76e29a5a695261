"""Probes of a router on a saturated decode worker: they pass all waiting requests of clients."""

import random

import pytest

from splitserve.core.request import PROBE_PRIORITY
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.pair import PairWorld

PAGE = 4
CLIENTS = "abcdefgh"
GREEDY = ResolvedSampling(max_new_tokens=24, temperature=0.0)
# Requests are retracted all the time.
WITHOUT_RESERVE = {"num_pages": 12, "page_size": PAGE, "num_reserved_decode_tokens": 1}
# Free pages are kept for the running requests.
WITH_RESERVE = {"num_pages": 20, "page_size": PAGE, "num_reserved_decode_tokens": 512}
# The pool is large, and all places of the running batch and all rows are taken.
WITHOUT_PLACES = {"num_pages": 200, "page_size": PAGE, "max_running": 1, "pre_alloc_size": 2}


def prompt_of(rid) -> list[int]:
    return [ord(rid) + i for i in range(8)]


def happen_until(world, condition) -> None:
    for _ in range(50_000):
        if condition():
            return
        world.happen()
    raise AssertionError("the condition never became true")


def num_ended(world) -> int:
    return sum(world.decode.finish(rid) is not None for rid in CLIENTS)


def saturated(seed, decode, loop) -> PairWorld:
    """Return a pair with a decode worker that admits no request of a client, and that others wait for."""
    late = {"late_steps": random.Random(seed)} if loop != "normal" else {}
    settings = decode | late | ({"pp_size": 2} if loop == "pipelined" else {})
    world = PairWorld(seed, prefill_settings={"num_pages": 40, "page_size": PAGE}, decode_settings=settings)
    for room, rid in enumerate(CLIENTS):
        world.submit(rid, prompt_of(rid), GREEDY, room=room)

    def is_saturated() -> bool:
        state = world.decode.scheduler.state()
        first = next(iter(world.decode.role.queued()["prealloc"]), None)
        is_full = state.num_retracted_reqs > 0 or (first is not None and first.timeline.reason)
        return is_full and state.num_decode_prealloc_queue_reqs >= 2

    happen_until(world, is_saturated)
    return world


@pytest.mark.parametrize("loop", ["normal", "overlapped", "pipelined"])
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("decode", [WITHOUT_RESERVE, WITH_RESERVE, WITHOUT_PLACES])
@pytest.mark.parametrize("seed", range(4))
def test_a_probe_passes_the_requests_of_clients_on_a_saturated_decode_worker(seed, decode, num_tokens, loop):
    world = saturated(seed, decode, loop)
    waiting = {request.rid for request in world.decode.role.queued()["prealloc"]}
    before = num_ended(world)
    params = ResolvedSampling(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    world.submit("probe", [0], params, room=99, priority=PROBE_PRIORITY)
    happen_until(world, lambda: world.decode.finish("probe"))
    assert world.decode.tokens("probe") == expected_tokens([0], params, num_tokens)
    assert num_ended(world) - before <= (num_tokens if decode is WITHOUT_PLACES else 1)
    world.run_until_idle()
    for rid in CLIENTS:
        assert world.decode.tokens(rid) == expected_tokens(prompt_of(rid), GREEDY, GREEDY.max_new_tokens)
    timelines = {rid: world.decode.outputs[rid][-1].stages.seconds for rid in (*waiting, "probe")}
    ready, admitted = (timelines["probe"][stage] for stage in ("prealloc", "transfer"))
    assert not [rid for rid in waiting if ready < timelines[rid]["transfer"] < admitted]
    world.check_nothing_is_held()
