"""Draft heads beside the served model: proposals that are right more often than chance, and outputs as without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from splitserve.core.batch import RequestResult, RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import SplitserveError
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.heads.drafting import HeadDraftingRunner
from splitserve.engine.heads.mtp import MtpHead
from splitserve.engine.heads.states import HiddenStateTap
from splitserve.engine.kernels.library import find_library
from splitserve.engine.kernels.stack import DecoderStack
from splitserve.engine.kernels.weights import PackedLinear
from splitserve.engine.runner import ModelRunner
from support.draft_heads import TaughtModel, taught_with_mtp
from support.tiny_models import SMALL_SHAPE, TinyKind, make_tiny_model

PROMPT = [31, 172, 95, 180, 3]
NUM_TOKENS, PAGE_SIZE, NUM_PAGES = 30, 8, 8
GREEDY = ResolvedSampling(temperature=0.0, ignore_eos=True)
SAMPLED = ResolvedSampling(temperature=0.7, seed=4, ignore_eos=True)


def build(taught: TaughtModel, *, has_head: bool = True, **settings: Any) -> BuiltEngine:
    model = ModelConfig(model=str(taught.model), device="cpu", threads=1, **settings)
    cache = CacheConfig(page_size=PAGE_SIZE, max_total_tokens=PAGE_SIZE * NUM_PAGES)
    if not has_head:
        return build_engine(model, cache)
    name = None if taught.head is None else str(taught.head)
    return build_engine(model, cache, draft_model=name, draft_head=taught.algorithm)


@pytest.fixture(params=["taught_with_eagle3", "taught_with_mtp"])
def taught(request: pytest.FixtureRequest) -> TaughtModel:
    found: TaughtModel = request.getfixturevalue(request.param)
    return found


Runner = ModelRunner | HeadDraftingRunner


def runner_of(engine: BuiltEngine) -> HeadDraftingRunner:
    runner = engine.drafting_runner(np.arange(NUM_PAGES, dtype=np.int32).reshape(1, NUM_PAGES))
    assert isinstance(runner, HeadDraftingRunner)
    return runner


def prefill(runner: Runner, params: ResolvedSampling, chunk: int = 64, tokens: Sequence[int] = PROMPT) -> RequestResult:
    """Compute the tokens in chunks, and return the result of the last one."""
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        sample = SampleSpec(params, end, PROMPT, tokens[len(PROMPT) :]) if end == len(tokens) else None
        following = None if sample else tokens[end]
        step = RequestStep("r", 0, tokens[start:end], start, sample, following=following)
        result = runner.execute(StepPlan((step,))).requests[0]
    return result


def decode_step(output: list[int], params: ResolvedSampling, result: RequestResult) -> RequestStep:
    start = len(PROMPT) + len(output) - 1
    sample = SampleSpec(params, start + 1, PROMPT, list(output))
    return RequestStep("r", 0, output[-1:], start, sample, draft_state=result.draft_state)


def speculate(runner: HeadDraftingRunner, params: ResolvedSampling, num_proposals: int = 3) -> tuple[list[int], float]:
    """Return an output, and the share of accepted proposals."""
    result = prefill(runner, params, chunk=3)
    assert result.token_id is not None
    output, num_proposed, num_accepted = [result.token_id], 0, 0
    while len(output) < NUM_TOKENS:
        step = decode_step(output, params, result)
        [proposals] = runner.propose([step], [num_proposals])
        assert step.sample is not None
        sample = replace(step.sample, proposals=proposals)
        result = runner.execute(
            StepPlan((replace(step, token_ids=[*step.token_ids, *proposals], sample=sample),))
        ).requests[0]
        assert result.token_id is not None
        output += [*proposals[: result.num_accepted], result.token_id]
        num_proposed += len(proposals)
        num_accepted += result.num_accepted
    return output[:NUM_TOKENS], num_accepted / num_proposed


def plain_output(engine: BuiltEngine, params: ResolvedSampling) -> list[int]:
    runner = engine.runner(np.arange(NUM_PAGES, dtype=np.int32).reshape(1, NUM_PAGES))
    result = prefill(runner, params)
    assert result.token_id is not None
    output = [result.token_id]
    while len(output) < NUM_TOKENS:
        result = runner.execute(StepPlan((decode_step(output, params, result),))).requests[0]
        assert result.token_id is not None
        output.append(result.token_id)
    return output


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_are_those_without_a_head_and_many_proposals_are_right(
    taught: TaughtModel, params: ResolvedSampling
) -> None:
    output, acceptance = speculate(runner_of(build(taught)), params)
    assert output == plain_output(build(taught, has_head=False), params)
    # By chance one of 261 is.
    assert acceptance > 0.15


def test_the_heads_state_does_not_depend_on_chunks_and_proposals(taught: TaughtModel) -> None:
    params = GREEDY
    runner = runner_of(build(taught))
    output, _ = speculate(runner, params)
    tokens = [*PROMPT, *output[:20]]
    states = [prefill(runner_of(build(taught)), params, chunk, tokens).draft_state for chunk in (64, 7, 1)]
    # A step that follows accepted and rejected proposals.
    result, done = prefill(runner, params), 1
    while done < 21:
        step = decode_step(output[:done], params, result)
        assert step.sample is not None
        right, wrong = output[done : min(done + 2, 20)], [(output[min(done + 2, 20)] + 1) % 200]
        proposals = [*right, *wrong]
        sample = replace(step.sample, proposals=proposals)
        plan = StepPlan((replace(step, token_ids=[*step.token_ids, *proposals], sample=sample),))
        result = runner.execute(plan).requests[0]
        done += result.num_accepted + 1
    assert done == 21
    expected = np.frombuffer(states[0] or b"", np.float32)
    assert len(expected) == build(taught).draft_state_size == 96
    for state in (*states[1:], result.draft_state):
        np.testing.assert_allclose(np.frombuffer(state or b"", np.float32), expected, rtol=1e-3, atol=1e-4)


def test_a_request_without_a_heads_state_gets_no_proposals(taught: TaughtModel) -> None:
    runner = runner_of(build(taught))
    result = prefill(runner, GREEDY)
    assert result.token_id is not None
    known, unknown = (
        decode_step([result.token_id], GREEDY, result),
        decode_step([result.token_id], GREEDY, RequestResult()),
    )
    proposals = runner.propose([unknown, known], [3, 3])
    assert [len(p) for p in proposals] == [0, 3]


def test_the_heads_layer_is_in_the_same_pages(taught: TaughtModel) -> None:
    engine = build(taught)
    names = [(c.name, c.layer) for c in engine.layout.components if c.name.startswith("draft_")]
    assert names == ([("draft_k", 0), ("draft_v", 0)] if taught.head else [("draft_latent", 0)])
    assert engine.draft_fingerprint not in ("", engine.fingerprint)


needs_kernels = pytest.mark.skipif(find_library(torch.bfloat16) is None, reason="the kernels are not built")


@needs_kernels
def test_kernels_compute_the_heads_linear_layers(taught: TaughtModel) -> None:
    engine = build(taught, dtype="bfloat16")
    assert engine.draft is not None
    assert any(isinstance(module, PackedLinear) for module in engine.draft.loaded.model.modules())
    output, acceptance = speculate(runner_of(engine), GREEDY)
    assert output == plain_output(build(taught, has_head=False, dtype="bfloat16"), GREEDY)
    assert acceptance > 0.15


@needs_kernels
def test_kernels_run_a_decoder_in_parts_with_the_same_bits(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        **SMALL_SHAPE | {"vocab_size": 261, "num_hidden_layers": 5, "initializer_range": 0.2}
    )
    with torch.random.fork_rng(devices=[]):
        # The bound at the end holds for most weights, not for all.
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain, tapped = (
        build_engine(
            ModelConfig(model=str(tmp_path), device="cpu", threads=1, dtype="bfloat16"),
            CacheConfig(page_size=PAGE_SIZE, max_total_tokens=PAGE_SIZE * NUM_PAGES),
        )
        for _ in range(2)
    )
    tap = HiddenStateTap(tapped.loaded.model, (0, 3))
    decoders = tapped.loaded.model.base_model.layers
    assert [len(decoder.layers) for decoder in decoders if isinstance(decoder, DecoderStack)] == [1, 3, 1]
    assert plain_output(tapped, SAMPLED) == plain_output(plain, SAMPLED)
    found = tap.take().float()
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([[*PROMPT, *plain_output(plain, SAMPLED)[:-1]]])
    with torch.no_grad():
        hidden = reference(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat((hidden[1], hidden[4]), dim=-1)[0, -1:]
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "has the architecture LlamaForCausalLM.*--speculative-algorithm draft",
        ),
        ({"vocab_size": 300}, "has a vocab_size of 300, and the served model one of 261"),
        ({"target_hidden_size": 128}, "has a target_hidden_size of 128, and the served model one of 96"),
        ({"num_hidden_layers": 2}, "has 2 layers, which is not supported"),
        ({"norm_before_fc": True}, "has norm_before_fc set, which is not supported"),
        ({"eagle_config": {}}, "outputs of layers .*-1.*, and the model has layers 0 to 2"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    taught_with_eagle3: TaughtModel, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    assert taught_with_eagle3.head is not None
    head = copy_of(taught_with_eagle3.head, tmp_path / "head")
    change_config(head, **changes)
    with pytest.raises(SplitserveError, match=told):
        runner_of(build(TaughtModel(taught_with_eagle3.model, taught_with_eagle3.algorithm, head)))


def test_a_head_with_other_tensors_is_refused(taught_with_eagle3: TaughtModel, tmp_path: Path) -> None:
    assert taught_with_eagle3.head is not None
    head = copy_of(taught_with_eagle3.head, tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(SplitserveError, match=r"other tensors than EAGLE-3's.*layer\.hidden_norm\.weight"):
        build(TaughtModel(taught_with_eagle3.model, taught_with_eagle3.algorithm, head))


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.soak) for kind in ("qwen2", "qwen3")), "qwen3_moe"]
)
def test_an_mtp_layer_in_qwens_format_proposes(tmp_path: Path, kind: TinyKind) -> None:
    taught = taught_with_mtp(tmp_path, kind)
    engine = build(taught)
    assert isinstance(engine.draft and engine.draft.loaded.model, MtpHead)
    for params in (GREEDY, SAMPLED):
        output, acceptance = speculate(runner_of(engine), params)
        assert output == plain_output(build(taught, has_head=False), params)
        assert acceptance > 0.15
    tensors = load_file(taught.model / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, taught.model / "model.safetensors", {"format": "pt"})
    with pytest.raises(SplitserveError, match=r"has no mtp\.fc\.weight: .* the formats of DeepSeek-V3 and Qwen"):
        build(taught)


def test_a_qwen_with_linear_attention_is_refused_by_its_layers(tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(
        **SMALL_SHAPE | {"num_hidden_layers": 4},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SplitserveError, match="cannot be served: it has layers of type linear_attention"):
        build(TaughtModel(tmp_path, SpeculativeAlgorithm.MTP))


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_checkpoint_without_an_mtp_layer_is_refused(tmp_path: Path, kind: TinyKind) -> None:
    model = make_tiny_model(kind, tmp_path / kind)
    told = "no layer for multi-token prediction"
    if kind == "deepseek_v3":
        change_config(model, num_nextn_predict_layers=1)
        told = r"has no model\.layers\.3\.enorm\.weight"
    with pytest.raises(SplitserveError, match=told):
        build(TaughtModel(model, SpeculativeAlgorithm.MTP, None))
