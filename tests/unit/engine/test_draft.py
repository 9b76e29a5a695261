"""A draft model beside the served one: one pool, one page table, and the proposals that the same model would make."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from splitserve.core.batch import RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.draft import PipelinedDraftingRunner
from splitserve.engine.runner import ModelRunner
from support.tiny_models import TinyKind, make_tiny_model

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def build(tiny_folder: Callable[[TinyKind], Path]) -> Callable[[str], BuiltEngine]:
    def make(draft: str) -> BuiltEngine:
        model = ModelConfig(model=str(tiny_folder("llama")), device="cpu", threads=1)
        return build_engine(model, CacheConfig(page_size=8, max_total_tokens=64), draft_model=draft)

    return make


@pytest.fixture
def changed(tiny_folder: Callable[[TinyKind], Path], tmp_path: Path) -> Callable[..., str]:
    """Return the folder of a random model with a different config."""

    def make(**changes: Any) -> str:
        config = AutoConfig.from_pretrained(tiny_folder("llama"))
        config.update(changes)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return str(tmp_path)

    return make


def step(
    tokens: list[int], start: int, params: ResolvedSampling, output: list[int], proposals: list[int]
) -> RequestStep:
    position = start + len(tokens)
    spec = SampleSpec(params, position, PROMPT, output, return_hidden_state=True, proposals=proposals)
    return RequestStep("r", 0, [*tokens, *proposals], start, spec)


def test_the_layers_of_both_are_components_of_the_same_pages(
    build: Callable[[str], BuiltEngine], tiny_folder: Callable[[TinyKind], Path]
) -> None:
    engine = build(str(tiny_folder("qwen3")))
    names = [(c.name, c.layer) for c in engine.layout.components]
    own = [(name, layer) for layer in range(3) for name in ("k", "v")]
    assert names == own + [(f"draft_{name}", layer) for name, layer in own]
    assert [r.length for r in engine.regions] == [8 * c.page_bytes(8) for c in engine.layout.components]
    assert engine.draft_fingerprint not in ("", engine.fingerprint)
    draft = engine.pool.draft_token_to_kv_pool
    draft.keys[1].copy_(torch.randn(draft.keys[1].shape))
    before = draft.keys[1][3].clone()
    copy = engine.pool.save([3])
    assert sum(part.nbytes for part in copy.parts) == engine.pool.bytes_per_page == engine.layout.bytes_per_page
    draft.keys[1].zero_()
    engine.pool.restore(copy, 0, [6])
    assert torch.equal(draft.keys[1][6], before)
    assert not engine.pool.keys[1].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_model_as_its_own_draft_guesses_all_that_is_drawn(
    temperature: float, build: Callable[[str], BuiltEngine], tiny_folder: Callable[[TinyKind], Path]
) -> None:
    params = ResolvedSampling(temperature=temperature, seed=3, repetition_penalty=1.3, min_new_tokens=20)
    runner = build(str(tiny_folder("llama"))).drafting_runner(np.arange(8, dtype=np.int32).reshape(1, 8))
    first = runner.execute(StepPlan((step(PROMPT, 0, params, [], []),))).requests[0]
    output, states = [first.token_id], [*first.hidden_states]
    for num_guesses in (3, 0, 4):
        decode = step(output[-1:], len(PROMPT) + len(output) - 1, params, list(output), [])
        [guesses] = runner.propose([decode], [num_guesses])
        decode = step(output[-1:], decode.start, params, list(output), guesses)
        result = runner.execute(StepPlan((decode,))).requests[0]
        assert result.num_accepted == len(guesses) == num_guesses
        output += [*guesses, result.token_id]
        states += result.hidden_states
    plain = build(str(tiny_folder("llama"))).runner(np.arange(8, dtype=np.int32).reshape(1, 8))
    first = plain.execute(StepPlan((step(PROMPT, 0, params, [], []),))).requests[0]
    expected, expected_states = [first.token_id], [*first.hidden_states]
    while len(expected) < len(output):
        decode = step(expected[-1:], len(PROMPT) + len(expected) - 1, params, list(expected), [])
        result = plain.execute(StepPlan((decode,))).requests[0]
        expected.append(result.token_id)
        expected_states += result.hidden_states
    assert output == expected
    found, wanted = (np.frombuffer(b"".join(s), np.float32) for s in (states, expected_states))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_guesses_count_up_to_the_first_that_is_wrong(
    build: Callable[[str], BuiltEngine], tiny_folder: Callable[[TinyKind], Path]
) -> None:
    params = ResolvedSampling(temperature=0.0, min_new_tokens=20)
    runner = build(str(tiny_folder("llama"))).drafting_runner(np.arange(8, dtype=np.int32).reshape(1, 8))
    first = runner.execute(StepPlan((step(PROMPT, 0, params, [], []),))).requests[0].token_id
    [guesses] = runner.propose([step([first], 5, params, [first], [])], [4])
    wrong = [*guesses[:2], (guesses[2] + 1) % 250, guesses[3]]
    result = runner.execute(StepPlan((step([first], 5, params, [first], wrong),))).requests[0]
    assert (result.num_accepted, result.token_id) == (2, guesses[2])
    # Those that the two accepted proposals and the token behind them were sampled from.
    assert len(result.hidden_states) == 3


@pytest.fixture
def pipelined(
    build: Callable[[str], BuiltEngine], tiny_folder: Callable[[TinyKind], Path]
) -> tuple[BuiltEngine, npt.NDArray[np.int32], PipelinedDraftingRunner]:
    """Return an engine with the same model as its draft, the page table of two requests, and a runner for stages."""
    engine = build(str(tiny_folder("llama")))
    assert engine.draft is not None
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    draft = ModelRunner(engine.draft.loaded, engine.draft.attention, 8, table)
    return engine, table, PipelinedDraftingRunner(engine.runner(table), draft)


def test_a_step_that_is_begun_writes_the_drafts_kv_to_the_pages_that_it_had_then(
    pipelined: tuple[BuiltEngine, npt.NDArray[np.int32], PipelinedDraftingRunner],
) -> None:
    engine, table, runner = pipelined
    params = ResolvedSampling(temperature=0.0, min_new_tokens=20)
    first = runner.begin(StepPlan((step(PROMPT, 0, params, [], []),)))().requests[0].token_id
    [proposals] = runner.propose([step([first], 5, params, [first], [])], [4])
    for proposed in (proposals, [proposals[0], *[(token + 1) % 250 for token in proposals[1:]]]):
        run = runner.begin(StepPlan((step([first], 5, params, [first], proposed),)))
        # The request ends, and another one gets its row.
        before, table[0] = table[0].copy(), [7, 7, 7, 7]
        result = run().requests[0]
        table[0] = before
        assert result.num_accepted == (4 if proposed == proposals else 1)
        # Position 9, the last proposal, in page 1 of the row.
        keys = engine.pool.draft_token_to_kv_pool.keys[0]
        assert keys[1, 1].any()
        assert not keys[7].any()
        keys[1, 1].zero_()


def test_tokens_are_proposed_while_the_step_of_another_request_is_in_flight(
    pipelined: tuple[BuiltEngine, npt.NDArray[np.int32], PipelinedDraftingRunner],
) -> None:
    _, _, runner = pipelined
    params = ResolvedSampling(temperature=0.0, min_new_tokens=20)
    prompt = step(PROMPT, 0, params, [], [])
    first = runner.begin(StepPlan((prompt,)))().requests[0].token_id
    other = replace(prompt, rid="other", row=1)
    decode = step([first], 5, params, [first], [])
    expected = runner.propose([decode], [3])
    with ThreadPoolExecutor(1) as engine_thread:
        for _ in range(20):
            run = engine_thread.submit(runner.begin(StepPlan((other,))))
            assert runner.propose([decode], [3]) == expected
            assert run.result().requests[0].token_id == first


def test_a_draft_model_has_the_dtype_of_the_served_one(tiny_folder: Callable[[TinyKind], Path], tmp_path: Path) -> None:
    """Its KV is in pages of that dtype. By default a checkpoint's own dtype decides."""
    served = str(make_tiny_model("llama", tmp_path / "served", dtype=torch.bfloat16))
    engine = build_engine(
        ModelConfig(model=served, device="cpu", threads=1),
        CacheConfig(page_size=8, max_total_tokens=64),
        draft_model=str(tiny_folder("qwen3")),
    )
    assert engine.draft is not None
    assert engine.draft.loaded.dtype == engine.loaded.dtype
    runner = engine.drafting_runner(np.arange(8, dtype=np.int32).reshape(1, 8))
    params = ResolvedSampling(temperature=0.0)
    first = runner.execute(StepPlan((step(PROMPT, 0, params, [], []),))).requests[0].token_id
    [proposals] = runner.propose([step([first], 5, params, [first], [])], [2])
    assert len(proposals) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 300}, "vocabulary of 300 tokens.* one of 261"),
        ({"max_position_embeddings": 512}, r"context_length is 4096: for model .* \[1, 512\]"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    changes: dict[str, int], told: str, build: Callable[[str], BuiltEngine], changed: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=told):
        build(changed(**changes))
