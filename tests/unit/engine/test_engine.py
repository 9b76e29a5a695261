"""The built engine as the worker uses it: one call makes it, a bad step is one clear error, tiny models can chat."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoTokenizer

from splitserve.core.batch import InputLogprobSpec, RequestStep, SampleSpec, StepPlan, StepResult
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, EngineError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine import runner as runner_module
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.kernels.library import find_library
from support.fake_grammar import FakeMatcher
from support.tiny_models import TINY_KINDS, TinyKind

GREEDY = ResolvedSampling(temperature=0.0)


@pytest.fixture
def engine(tiny_folder: Callable[[TinyKind], Path]) -> BuiltEngine:
    # Some tests change the weights. Shared ones are read-only.
    model = ModelConfig(model=str(tiny_folder("llama")), device="cpu", threads=1, share_weights=False)
    return build_engine(model, CacheConfig(page_size=8, max_total_tokens=250))


def step(tokens: list[int], *, row: int = 0, start: int = 0, sample: bool = True) -> RequestStep:
    spec = SampleSpec(GREEDY, start + len(tokens), tokens, ()) if sample else None
    return RequestStep(f"request-{row}", row, tokens, start, spec)


def test_one_call_gives_model_pool_layout_and_regions(engine: BuiltEngine) -> None:
    assert engine.layout.num_pages == 32
    assert engine.max_total_tokens_per_request == 256
    assert [r.length for r in engine.regions] == [32 * c.page_bytes(8) for c in engine.layout.components]
    assert engine.fingerprint == engine.loaded.fingerprint


@pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_our_kernels_compute_all_of_every_tiny_model(kind: TinyKind, tiny_folder: Callable[[TinyKind], Path]) -> None:
    model = ModelConfig(model=str(tiny_folder(kind)), device="cpu", threads=1, dtype="bfloat16")
    assert build_engine(model, CacheConfig(page_size=8, max_total_tokens=250)).batch_invariant


def test_a_page_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size is 0"):
        build_engine(ModelConfig(), CacheConfig(page_size=0))


def test_results_come_in_plan_order_and_an_unfinished_prompt_gives_no_token(engine: BuiltEngine) -> None:
    runner = engine.runner(np.arange(32, dtype=np.int32).reshape(4, 8))
    first, second = step([1, 2, 3], row=0, sample=False), step([4, 5], row=1)
    alone = runner.execute(StepPlan((second,))).requests[0].token_id
    results = runner.execute(StepPlan((first, second))).requests
    assert results[0].token_id is None
    assert results[1].token_id == alone is not None
    assert results[1].logprob is None
    assert results[1].input_logprobs == ()


def test_an_empty_plan_gives_an_empty_result(engine: BuiltEngine) -> None:
    assert engine.runner(np.zeros((1, 1), np.int32)).execute(StepPlan(())) == StepResult(())


def test_logits_of_many_rows_are_computed_a_few_at_a_time(engine: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner(np.arange(32, dtype=np.int32).reshape(8, 4))
    plan = StepPlan(tuple(step([5 + row, 9], row=row) for row in range(8)))
    at_once = runner.execute(plan)
    monkeypatch.setattr(runner_module, "_MAX_LOGITS", 3 * engine.loaded.vocab_size)
    assert runner.execute(plan) == at_once


@pytest.mark.parametrize(
    ("request_step", "says"),
    [
        (step([5000]), "request-0"),
        (step([]), "request-0 has no tokens"),
        (step([1] * 65), "needs 9 pages"),
    ],
    ids=["token-out-of-range", "no-tokens", "too-few-pages"],
)
def test_a_bad_step_is_an_engine_error_and_the_next_one_runs(
    engine: BuiltEngine, request_step: RequestStep, says: str
) -> None:
    runner = engine.runner(np.arange(32, dtype=np.int32).reshape(4, 8))
    with pytest.raises(EngineError, match=says):
        runner.execute(StepPlan((request_step,)))
    assert runner.execute(StepPlan((step([1, 2]),))).requests[0].token_id is not None


def test_logits_that_are_not_numbers_are_an_error_not_a_token(engine: BuiltEngine) -> None:
    with torch.no_grad():
        engine.loaded.model.lm_head.weight[0, 0] = torch.nan
    (result,) = engine.runner(np.zeros((1, 1), np.int32)).execute(StepPlan((step([1]),))).requests
    assert result.token_id is None
    assert re.search("not numbers.*bfloat16 or float32", result.error)


def with_scores(request: RequestStep) -> RequestStep:
    return replace(request, input_logprobs=InputLogprobSpec(0, request.token_ids[1:]))


class BrokenMatcher(FakeMatcher):
    """A backend that raises, as its library does."""

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        raise RuntimeError("bad state")


@pytest.mark.parametrize("kind", ["drawing", "scoring", "drawing with its logprob", "grammar"])
def test_what_one_request_brings_fails_that_request_alone(engine: BuiltEngine, kind: str) -> None:
    runner = engine.runner(np.arange(32, dtype=np.int32).reshape(4, 8))
    good = with_scores(step([4, 5, 6], row=1))
    alone = runner.execute(StepPlan((good,))).requests[0]
    bad = step([1, 2, 3], row=0)
    assert bad.sample is not None
    if kind == "grammar":
        bad = replace(bad, sample=replace(bad.sample, grammar=BrokenMatcher(1, 1, frozenset())))
    else:
        with torch.no_grad():
            engine.loaded.model.get_input_embeddings().weight[2] = torch.nan
    if kind == "scoring":
        bad = with_scores(replace(bad, sample=None))
    elif kind == "drawing with its logprob":
        bad = replace(bad, sample=replace(bad.sample, return_logprob=True))
    found = runner.execute(StepPlan((bad, good))).requests
    assert re.search("grammar failed.*bad state" if kind == "grammar" else "not numbers", found[0].error)
    assert found[0].token_id is None
    assert not found[0].input_logprobs
    assert (found[1].token_id, found[1].error) == (alone.token_id, "")
    assert [score.logprob for score in found[1].input_logprobs] == pytest.approx(
        [score.logprob for score in alone.input_logprobs], abs=1e-4
    )


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_tiny_models_come_with_a_tokenizer_that_keeps_any_text(
    kind: TinyKind, tiny_folder: Callable[[TinyKind], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder(kind))
    text = "Grüße, 世界! \n\t🙂"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<bos><user>Hi<eos><assistant>"
    # transformers' class for Qwen2 adds a token that no text contains.
    assert len(tokenizer) == 261 + (kind == "qwen2")
