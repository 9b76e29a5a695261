"""Speculation on real attention: answers are those without it, and a draft finds its KV wherever pages have been."""

import random

import pytest
import torch

from splitserve.core.config import ModelConfig
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.loader import load_model
from splitserve.scheduler.speculation import NgramProposer
from support.pair import PairWorld
from support.real_engine import real_engine, varied_sampling
from support.sim import ColocatedWorld, SimWorker
from support.tiny_models import make_tiny_model

NUM_REQUESTS, NUM_OUTPUT_TOKENS, PAGE_SIZE, NUM_DRAFT_TOKENS = 8, 24, 4, 4
# The longest request takes 14 pages of these.
# Host memory for a few pages: some come back from copies, some are computed again.
TIGHT = {"num_pages": 16, "num_reserved_decode_tokens": 1, "host_memory": 24 << 10}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model of the same vocabulary."""
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "other", seed=1)
    return load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", threads=1))


def requests_of(vocab_size: int) -> list[GenerateRequest]:
    """Greedy, seeded, with penalties, filters, bias and a minimum; prompts that go round in circles, too."""
    rng = random.Random(6)
    requests = []
    for i in range(NUM_REQUESTS):
        params = varied_sampling(
            i,
            NUM_OUTPUT_TOKENS,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
            # The tokens of a random model do not repeat by themselves.
            logit_bias={7: 60.0, 9: 60.0} if i % 4 < 2 else {},
        )
        circle = [rng.randrange(vocab_size - 8) for _ in range(rng.randrange(1, 10))]
        prompt = circle * rng.randrange(1, 4)
        requests.append(GenerateRequest(rid=f"r{i}", prompt_ids=prompt, params=params, return_logprob=True))
    return requests


def proposals(proposer) -> dict:
    """Return settings of a worker. `proposer`: None is that of the draft model, if there is one."""
    return {"proposer": proposer, "num_draft_tokens": NUM_DRAFT_TOKENS}


def colocated(requests, engine, proposer, **settings) -> SimWorker:
    world = ColocatedWorld(page_size=PAGE_SIZE, token_budget=32, make_engine=engine, **proposals(proposer), **settings)
    for request in requests:
        world.submit(request)
    world.run_until_idle()
    world.check_nothing_is_held()
    return world


def disaggregated(requests, engine, proposer, **settings) -> SimWorker:
    prefill = {"num_pages": 512, "page_size": 8, "token_budget": 32, "make_engine": engine}
    decode = {"page_size": PAGE_SIZE, "make_engine": engine, **proposals(proposer), **settings}
    world = PairWorld(7, prefill_settings=prefill, decode_settings=decode, num_slots=32)
    for room, request in enumerate(requests):
        world.submit(request.rid, request.prompt_ids, request.params, room=room, return_logprob=True)
    world.run_until_idle()
    world.check_nothing_is_held()
    return world.decode


def logprobs_of(worker: SimWorker, rid: str) -> list[float]:
    return [lp.logprob for output in worker.outputs[rid] for lp in output.logprobs]


def acceptance(worker: SimWorker) -> float:
    state = worker.scheduler.state()
    return state.spec_decode_num_accepted_tokens_total / state.spec_decode_num_draft_tokens_total


@pytest.mark.parametrize("tiny", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("run", [colocated, disaggregated])
def test_answers_are_those_of_a_run_without_it(tiny, other, run):
    loaded, _ = tiny
    requests = requests_of(loaded.vocab_size)
    plain = run(requests, real_engine(loaded), None, num_pages=512)
    runs = {
        "ngram": run(requests, real_engine(loaded), NgramProposer(4), num_pages=512),
        "other": run(requests, real_engine(loaded, other), None, num_pages=512),
        "same, tight": run(requests, real_engine(loaded, loaded), None, **TIGHT),
    }
    for name, speculating in runs.items():
        for rid in (request.rid for request in requests):
            assert speculating.tokens(rid) == plain.tokens(rid), (name, rid)
            # Another batch is another order of sums.
            assert logprobs_of(speculating, rid) == pytest.approx(logprobs_of(plain, rid), abs=1e-3)
        retractions = speculating.scheduler.state().num_retracted_requests_total
        assert (retractions >= 3) == ("tight" in name), name
    assert runs["ngram"].scheduler.state().spec_decode_num_accepted_tokens_total > 0
    assert acceptance(runs["other"]) < 0.5
    # All proposals are right only if it finds its KV of transferred prompts, of cached prefixes, and of copies.
    assert acceptance(runs["same, tight"]) > 0.99


@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_a_draft_finds_its_kv_of_a_cached_prefix(tiny):
    loaded, _ = tiny
    world = ColocatedWorld(
        page_size=PAGE_SIZE, num_pages=64, make_engine=real_engine(loaded, loaded), **proposals(None)
    )
    prompt = list(range(40))
    for rid, tail in (("cold", [50]), ("warm", [60])):
        params = ResolvedSampling(max_new_tokens=21, min_new_tokens=21, temperature=0.0)
        world.submit(GenerateRequest(rid=rid, prompt_ids=prompt + tail, params=params))
        world.run_until_idle()
    assert world.cached("warm") == 40
    assert acceptance(world) == 1.0
