"""The engine against transformers itself: same tokens, same logprobs, however the work is cut into pages and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from splitserve.core.batch import HiddenState, InputLogprobSpec, RequestStep, SampleSpec, StepPlan, TokenLogprob
from splitserve.core.config import ModelConfig
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.runner import ModelRunner
from support.tiny_models import TINY_KINDS, TinyKind

# The KV of this many tokens crosses a border of pages of 16 for each prompt.
NUM_NEW = 18
# On both sides of page, chunk, block and window borders.
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 65, 150, 300)

LoadTiny = Callable[[TinyKind], LoadedModel]
GREEDY = ResolvedSampling(temperature=0.0, ignore_eos=True)


@dataclass
class Sample:
    """One request of the loop."""

    prompt_ids: list[int]
    params: ResolvedSampling = GREEDY
    num_top_logprobs: int = 0
    # First prompt position to score; None: none.
    logprob_start: int | None = None
    return_hidden_states: bool = False
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    hidden_states: list[HiddenState] = field(default_factory=list)
    computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.output_ids


class HandLoop:
    """The least that drives a ModelRunner, with a pool of its own: pages in a shuffled order, prompts in chunks."""

    def __init__(self, loaded: LoadedModel, *, page_size: int, num_tokens: int = 4096) -> None:
        num_pages = -(-num_tokens // page_size)
        layout = layout_for(loaded.layers, loaded.dtype_name, page_size=page_size, num_pages=num_pages)
        self.pool = KVPool(layout, loaded.device)
        self.page_table = np.zeros((64, num_pages), np.int32)
        self.runner = ModelRunner(loaded, TorchSdpaBackend(self.pool), page_size, self.page_table)
        self._free = np.random.default_rng(0).permutation(num_pages).tolist()
        self._page_size = page_size

    def generate(self, sequences: Sequence[Sample], num_new: int, chunk: int) -> None:
        """Until each has `num_new` tokens. Prompts advance `chunk` tokens a step; a done prompt decodes meanwhile."""
        for row, sequence in enumerate(sequences):
            num_pages = -(-(len(sequence.prompt_ids) + num_new) // self._page_size)
            self.page_table[row, :num_pages] = [self._free.pop() for _ in range(num_pages)]
        while running := [(r, s) for r, s in enumerate(sequences) if len(s.output_ids) < num_new]:
            plan = StepPlan(tuple(self._step_of(row, sequence, chunk) for row, sequence in running))
            results = self.runner.execute(plan).requests
            for (_, sequence), step, result in zip(running, plan.requests, results, strict=True):
                sequence.computed += len(step.token_ids)
                sequence.input_logprobs += result.input_logprobs
                if result.token_id is not None:
                    sequence.output_ids.append(result.token_id)
                if result.logprob is not None:
                    sequence.logprobs.append(result.logprob)
                sequence.hidden_states += result.hidden_states

    def _step_of(self, row: int, s: Sample, chunk: int) -> RequestStep:
        end = min(s.computed + chunk, len(s.tokens))
        sample = None
        if end == len(s.tokens):
            sample = SampleSpec(
                params=s.params,
                position=end,
                prompt_ids=s.prompt_ids,
                output_ids=tuple(s.output_ids),
                return_logprob=True,
                num_top_logprobs=s.num_top_logprobs,
                return_hidden_state=s.return_hidden_states,
            )
        return RequestStep(f"r{row}", row, s.tokens[s.computed : end], s.computed, sample, self._scored(s, end))

    def _scored(self, s: Sample, end: int) -> InputLogprobSpec | None:
        """Logits at position p score prompt token p + 1."""
        if s.logprob_start is None:
            return None
        first = max(s.computed, s.logprob_start - 1)
        last = min(end, len(s.prompt_ids) - 1)
        if first >= last:
            return None
        return InputLogprobSpec(first - s.computed, s.prompt_ids[first + 1 : last + 1], s.num_top_logprobs)


def prompts(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def generate_alone(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers' own `generate`."""
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    out = model.generate(
        torch.tensor([prompt]), attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def reference(tiny_folder: Callable[[TinyKind], Path]) -> Callable[[TinyKind], Any]:
    """The same weights in transformers' own hands."""
    models: dict[TinyKind, Any] = {}

    def load(kind: TinyKind) -> Any:
        if kind not in models:
            models[kind] = AutoModelForCausalLM.from_pretrained(
                tiny_folder(kind), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return models[kind]

    return load


@pytest.fixture(scope="module")
def expected(reference: Callable[[TinyKind], Any]) -> Callable[[TinyKind], list[list[int]]]:
    """Greedy tokens of transformers' `generate` for every prompt."""
    outputs: dict[TinyKind, list[list[int]]] = {}

    def generate(kind: TinyKind) -> list[list[int]]:
        if kind not in outputs:
            model = reference(kind)
            outputs[kind] = [generate_alone(model, p) for p in prompts(model.config.vocab_size)]
        return outputs[kind]

    return generate


@pytest.mark.parametrize(
    ("kind", "page_size", "chunk"),
    [
        *((kind, 16, chunk) for kind in TINY_KINDS for chunk in (7, 2048)),
        # Pages of one token are the same for every kind of model.
        *(pytest.param(kind, 1, 64, marks=() if kind == "llama" else pytest.mark.soak) for kind in TINY_KINDS),
    ],
)
def test_greedy_tokens_equal_transformers_generate(
    kind: TinyKind,
    page_size: int,
    chunk: int,
    tiny_model: LoadTiny,
    expected: Callable[[TinyKind], list[list[int]]],
) -> None:
    loaded = tiny_model(kind)
    batch = [Sample(p) for p in prompts(loaded.vocab_size)]
    HandLoop(loaded, page_size=page_size).generate(batch, NUM_NEW, chunk)
    assert [s.output_ids for s in batch] == expected(kind)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_request_alone_gives_the_tokens_it_gives_in_a_batch(
    kind: TinyKind, tiny_model: LoadTiny, expected: Callable[[TinyKind], list[list[int]]]
) -> None:
    loaded = tiny_model(kind)
    for number in (2, 9):
        alone = [Sample(prompts(loaded.vocab_size)[number])]
        HandLoop(loaded, page_size=4).generate(alone, NUM_NEW, chunk=64)
        assert alone[0].output_ids == expected(kind)[number]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_logprobs_of_prompt_and_output_equal_a_full_forward(
    kind: TinyKind, tiny_model: LoadTiny, reference: Callable[[TinyKind], Any]
) -> None:
    loaded = tiny_model(kind)
    batch = [Sample(p, logprob_start=1, num_top_logprobs=3) for p in prompts(loaded.vocab_size, (1, 40, 130))]
    HandLoop(loaded, page_size=16).generate(batch, 8, chunk=48)
    for s in batch:
        with torch.inference_mode():
            logprobs = reference(kind)(torch.tensor([s.tokens])).logits[0].log_softmax(-1)
        found = s.input_logprobs + s.logprobs
        assert [t.token_id for t in found] == s.tokens[1:]
        own = logprobs[torch.arange(len(found)), torch.tensor(s.tokens[1:])]
        torch.testing.assert_close(torch.tensor([t.logprob for t in found]), own, rtol=1e-4, atol=2e-4)
        top = logprobs[:-1].topk(3)
        torch.testing.assert_close(
            torch.tensor([[value for _, value in t.top] for t in found]), top.values, rtol=1e-4, atol=2e-4
        )
        assert [[token for token, _ in t.top] for t in found] == top.indices.tolist()


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_hidden_states_are_those_behind_the_final_norm_of_transformers(
    kind: TinyKind, tiny_model: LoadTiny, reference: Callable[[TinyKind], Any]
) -> None:
    loaded = tiny_model(kind)
    batch = [Sample(p, return_hidden_states=p != [0]) for p in [*prompts(loaded.vocab_size, (1, 40, 130)), [0]]]
    HandLoop(loaded, page_size=16).generate(batch, 8, chunk=48)
    for s in batch[:-1]:
        with torch.inference_mode():
            out = reference(kind)(torch.tensor([s.tokens[:-1]]), output_hidden_states=True)
        expected = out.hidden_states[-1][0, len(s.prompt_ids) - 1 :]
        found = torch.frombuffer(bytearray(b"".join(s.hidden_states)), dtype=torch.float32).view(8, loaded.hidden_size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
        # Their head makes the logits of the tokens that follow.
        assert reference(kind).lm_head(found).argmax(-1).tolist() == s.output_ids
    assert batch[-1].hidden_states == []


def test_input_logprobs_begin_where_asked(tiny_model: LoadTiny) -> None:
    loaded = tiny_model("llama")
    prompt = prompts(loaded.vocab_size, (50,))[0]
    part = [Sample(prompt, logprob_start=20)]
    HandLoop(loaded, page_size=16).generate(part, 1, chunk=16)
    assert [t.token_id for t in part[0].input_logprobs] == prompt[20:]


def test_seeded_sampling_does_not_depend_on_the_batch_or_the_chunks(tiny_model: LoadTiny) -> None:
    loaded = tiny_model("qwen3")
    params = [ResolvedSampling(temperature=0.8, seed=i, ignore_eos=True) for i in range(6)]
    requests = list(zip(prompts(loaded.vocab_size, (3, 20, 33, 64, 100, 1)), params, strict=True))
    together = [Sample(p, q) for p, q in requests]
    HandLoop(loaded, page_size=16).generate(together, 16, chunk=2048)
    for s, (p, q) in zip(together, requests, strict=True):
        alone = [Sample(p, q)]
        HandLoop(loaded, page_size=1).generate(alone, 16, chunk=9)
        assert alone[0].output_ids == s.output_ids


def test_what_a_former_owner_left_in_a_page_reaches_nobody(tiny_model: LoadTiny) -> None:
    loaded = tiny_model("gemma3")
    clean, dirty = HandLoop(loaded, page_size=16), HandLoop(loaded, page_size=16)
    for tensor in (*dirty.pool.keys.values(), *dirty.pool.values.values()):
        tensor.fill_(torch.nan)
    outputs = []
    for loop in (clean, dirty):
        batch = [Sample(p) for p in prompts(loaded.vocab_size, (5, 40, 70))]
        loop.generate(batch, 20, chunk=32)
        outputs.append([s.output_ids for s in batch])
    assert outputs[0] == outputs[1]


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma2Config(
            **SMALL, head_dim=8, sliding_window=16, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
        ),
        transformers.MistralConfig(**SMALL, sliding_window=20),
        transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        transformers.GraniteConfig(**SMALL, logits_scaling=3.0),
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1),
    ],
    ids=["gemma2-softcaps", "mistral-window", "qwen2-window-above", "granite-scaled-logits", "gpt2-learned-positions"],
)
def test_other_families_give_the_tokens_of_transformers(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(model=str(tmp_path), device="cpu", threads=1))
    batch = [Sample(p) for p in prompts(64, (5, 40, 100))]
    HandLoop(loaded, page_size=16).generate(batch, NUM_NEW, chunk=33)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert [s.output_ids for s in batch] == [generate_alone(reference, s.prompt_ids) for s in batch]
