"""Real attention in a pool so small that requests are retracted dozens of times: output equals that without pressure.

In float32 one model with pages of each kind, in the served dtypes bit for bit; `make soak` has the other models.
"""

import random

import pytest

from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.pair import PairWorld
from support.real_engine import real_engine
from support.sim import ColocatedWorld, SimWorker

NUM_REQUESTS, NUM_OUTPUT_TOKENS, PAGE_SIZE = 20, 40, 4
# The longest request takes 16 pages of these.
TIGHT = {"num_pages": 22, "num_reserved_decode_tokens": 1, "max_running": 16}
ROOMY = {"num_pages": 1024, "max_running": 16}


def requests_of(vocab_size: int) -> list[GenerateRequest]:
    """Half of them greedy, half seeded, all with logprobs, some of the prompt too."""
    rng = random.Random(6)
    requests = []
    for i in range(NUM_REQUESTS):
        params = ResolvedSampling(
            max_new_tokens=NUM_OUTPUT_TOKENS,
            temperature=0.8 * (i % 2),
            seed=i,
            ignore_eos=True,
            frequency_penalty=0.5 * (i % 3),
        )
        prompt = [rng.randrange(vocab_size - 8) for _ in range(rng.randrange(1, 24))]
        start = 0 if i % 4 == 0 else None
        requests.append(
            GenerateRequest(rid=f"r{i}", prompt_ids=prompt, params=params, return_logprob=True, logprob_start=start)
        )
    return requests


def run_colocated(requests: list[GenerateRequest], settings) -> SimWorker:
    world = ColocatedWorld(page_size=PAGE_SIZE, token_budget=64, **settings)
    for request in requests:
        world.submit(request)
    world.run_until_idle()
    world.check_nothing_is_held()
    return world


def run_disaggregated(requests: list[GenerateRequest], settings) -> SimWorker:
    prefill = {"num_pages": 1024, "page_size": PAGE_SIZE, "token_budget": 64, "make_engine": settings["make_engine"]}
    world = PairWorld(7, prefill_settings=prefill, decode_settings={"page_size": PAGE_SIZE, **settings}, num_slots=32)
    for room, request in enumerate(requests):
        world.submit(request.rid, request.prompt_ids, request.params, room=room, return_logprob=True)
    world.run_until_idle()
    world.check_nothing_is_held()
    return world.decode


def logprobs_of(worker: SimWorker, rid: str) -> list[float]:
    return [lp.logprob for output in worker.outputs[rid] for lp in output.logprobs]


# Each model comes back to a copy and is computed again, on one worker and on two. `make soak` has all four ways.
ALL_WAYS = [(run, host_memory) for run in (run_colocated, run_disaggregated) for host_memory in (1 << 30, 0)]
WAYS, OTHER_WAYS = (ALL_WAYS[0], ALL_WAYS[3]), (ALL_WAYS[1], ALL_WAYS[2])


@pytest.mark.parametrize(
    ("tiny", "ways"),
    [
        ("llama", WAYS),
        ("deepseek_v3", OTHER_WAYS),
        pytest.param("llama", OTHER_WAYS, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", WAYS, marks=pytest.mark.soak),
        *(pytest.param(kind, ALL_WAYS, marks=pytest.mark.soak) for kind in ("qwen3", "gemma3", "mixtral")),
    ],
    indirect=["tiny"],
)
def test_output_is_that_of_a_run_in_a_large_pool(tiny, ways):
    loaded, _ = tiny
    requests, engine = requests_of(loaded.vocab_size), real_engine(loaded)
    for run, host_memory in ways:
        unhurried = run(requests, ROOMY | {"make_engine": engine})
        assert unhurried.scheduler.state().num_retracted_requests_total == 0
        pressed = run(requests, TIGHT | {"make_engine": engine, "host_memory": host_memory})
        assert pressed.scheduler.state().num_retracted_requests_total >= 24
        for rid in (request.rid for request in requests):
            assert pressed.tokens(rid) == unhurried.tokens(rid)
            assert len(pressed.tokens(rid)) == NUM_OUTPUT_TOKENS
            # Another batch is another order of sums.
            assert logprobs_of(pressed, rid) == pytest.approx(logprobs_of(unhurried, rid), abs=1e-3)
            scored = [[lp.logprob for lp in worker.input_logprobs(rid)] for worker in (pressed, unhurried)]
            assert scored[0] == pytest.approx(scored[1], abs=1e-3)


def bits_of(worker: SimWorker, rid: str) -> tuple[list[int], list[float], list[float]]:
    return worker.tokens(rid), logprobs_of(worker, rid), [lp.logprob for lp in worker.input_logprobs(rid)]


@pytest.mark.parametrize(
    ("served", "ways"),
    [
        ("gemma3 bf16", WAYS),
        ("llama w8a8", OTHER_WAYS),
        pytest.param("gemma3 bf16", OTHER_WAYS, marks=pytest.mark.soak),
        pytest.param("llama w8a8", WAYS, marks=pytest.mark.soak),
        pytest.param("llama bf16", ALL_WAYS, marks=pytest.mark.soak),
    ],
    indirect=["served"],
)
def test_in_a_served_dtype_neither_retraction_nor_another_worker_changes_a_bit(served, ways):
    requests, engine = requests_of(served.vocab_size), real_engine(served)
    unhurried = run_colocated(requests, ROOMY | {"make_engine": engine})
    expected = {r.rid: bits_of(unhurried, r.rid) for r in requests}
    assert all(len(tokens) == NUM_OUTPUT_TOKENS for tokens, _, _ in expected.values())
    for run, host_memory in ways:
        pressed = run(requests, TIGHT | {"make_engine": engine, "host_memory": host_memory})
        assert pressed.scheduler.state().num_retracted_requests_total >= 24
        for rid, (tokens, logprobs, scores) in expected.items():
            found = bits_of(pressed, rid)
            assert found[:2] == (tokens, logprobs), (run.__name__, host_memory, rid)
            # The pair was not requested to score prompts.
            assert found[2] == (scores if run is run_colocated else [])
