"""Real attention in both loops: the overlapped one says what the normal one says, whatever is asked and whenever steps
end."""

import random

import pytest
import torch

from splitserve.core.config import ModelConfig
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.grammar_process import XGrammarCompiler
from splitserve.engine.loader import LoadedModel, load_model
from support.local_grammar import LocalCompiler
from support.pair import PairWorld
from support.real_engine import real_engine
from support.sim import ColocatedWorld, SimWorker
from support.tiny_models import make_tiny_model

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    return load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", threads=1))


def requests_of(vocab_size: int) -> list[GenerateRequest]:
    """Greedy and seeded, with logprobs of output and prompt, grammars, penalties, stop ids and least lengths."""
    rng = random.Random(3)
    requests = []
    for i in range(NUM_REQUESTS):
        params = ResolvedSampling(
            max_new_tokens=rng.randrange(1, 40),
            min_new_tokens=1 if i % 4 else 0,
            temperature=0.0 if i % 2 else 0.9,
            top_p=0.9 if i % 3 else 1.0,
            seed=i,
            repetition_penalty=1.3 if i == 5 else 1.0,
            stop_token_ids=tuple(rng.sample(range(vocab_size), vocab_size // 16)) if i % 3 == 0 else (),
            grammar=GrammarSpec(GrammarKind.REGEX, "[a-f]{4,12}") if i in (7, 15) else None,
        )
        prompt = [rng.randrange(vocab_size - 8) for _ in range(rng.randrange(1, 70))]
        start = 0 if i % 5 == 0 else None
        requests.append(
            GenerateRequest(rid=f"r{i}", prompt_ids=prompt, params=params, return_logprob=True, logprob_start=start)
        )
    return requests


def settings_of(loaded: LoadedModel, **more) -> dict:
    return {
        "num_pages": 256,
        "page_size": 4,
        "token_budget": 48,
        "max_running": 12,
        "eos_token_ids": loaded.eos_token_ids,
        "make_engine": real_engine(loaded),
        "grammar_compiler": LocalCompiler(XGrammarCompiler(loaded.folder, loaded.vocab_size, loaded.eos_token_ids)),
        **more,
    }


def run_colocated(loaded: LoadedModel, requests: list[GenerateRequest], **loop) -> SimWorker:
    world = ColocatedWorld(**settings_of(loaded, **loop))
    for i, request in enumerate(requests):
        world.submit(request)
        world.turn()
        if i % 8 == 7:
            world.submit(AbortRequest(rid=request.rid))
    world.run_until_idle()
    world.check_nothing_is_held()
    return world


def run_disaggregated(loaded: LoadedModel, requests: list[GenerateRequest], **loop) -> SimWorker:
    settings = settings_of(loaded, **loop)
    world = PairWorld(4, prefill_settings=settings, decode_settings=settings, num_slots=32)
    for room, request in enumerate(requests):
        world.submit(request.rid, request.prompt_ids, request.params, room=room, return_logprob=True)
    world.run_until_idle(max_events=2_000_000)
    world.check_nothing_is_held()
    return world.decode


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("run", [run_colocated, run_disaggregated])
def test_both_loops_say_the_same(loaded, run, seed):
    requests = requests_of(loaded.vocab_size)
    normal = run(loaded, requests)
    overlapped = run(loaded, requests, late_steps=random.Random(seed))
    for i, rid in enumerate(request.rid for request in requests):
        got, expected = overlapped.tokens(rid), normal.tokens(rid)
        if run is run_colocated and i % 8 == 7:
            shorter = min(len(got), len(expected))
            assert got[:shorter] == expected[:shorter]
            continue
        assert got == expected
        assert overlapped.finish(rid) == normal.finish(rid)
        logprobs = [[lp.logprob for o in w.outputs[rid] for lp in o.logprobs] for w in (overlapped, normal)]
        # Other batches are other orders of sums.
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
        scored = [[lp.logprob for lp in w.input_logprobs(rid)] for w in (overlapped, normal)]
        assert scored[0] == pytest.approx(scored[1], abs=1e-3)
