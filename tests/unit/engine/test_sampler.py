"""The vectorised sampler against a slow one that takes a row at a time, and its promises about seeds and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.batch import SampleSpec
from splitserve.core.errors import EngineError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine import sampler
from splitserve.engine.sampler import NO_TOKEN, WIDTH, descend, sample_tokens, score, variates_of
from support.reference import uniform_at

VOCAB = 40
EOS = frozenset({3, 7})
TOKENS = st.integers(0, VOCAB - 1)

PARAMS = st.builds(
    ResolvedSampling,
    min_new_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-5, 5), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
SPECS = st.builds(
    lambda params, prompt_ids, output_ids: SampleSpec(params, len(prompt_ids + output_ids), prompt_ids, output_ids),
    params=PARAMS,
    prompt_ids=st.lists(TOKENS, min_size=1, max_size=8),
    output_ids=st.lists(TOKENS, max_size=6),
)


def processed_by_hand(logits: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """One row, in the order that SamplingParams gives."""
    p, row = spec.params, logits.astype(np.float32).copy()
    for token, bias in p.logit_bias.items():
        row[token] += np.float32(bias)
    for token in set(spec.prompt_ids) | set(spec.output_ids):
        row[token] *= np.float32(p.repetition_penalty) if row[token] <= 0 else np.float32(1 / p.repetition_penalty)
    for token in set(spec.output_ids):
        row[token] -= np.float32(p.frequency_penalty * list(spec.output_ids).count(token) + p.presence_penalty)
    if len(spec.output_ids) < p.min_new_tokens:
        for token in set(p.stop_token_ids) | (set() if p.ignore_eos else EOS):
            row[token] = -np.inf
    return row.astype(np.float64)


def kept_by_hand(row: np.ndarray, p: ResolvedSampling) -> np.ndarray:
    """Probabilities after temperature, with the tokens that a filter drops at 0."""
    probs = np.exp((row - row.max()) / p.temperature)
    probs /= probs.sum()
    ranked = sorted(probs, reverse=True)
    least = p.min_p * ranked[0]
    if p.top_k >= 1:
        least = max(least, ranked[min(p.top_k, len(ranked)) - 1])
    if p.top_p < 1.0:
        mass = 0.0
        for probability in ranked:
            mass += probability
            if mass >= p.top_p:
                break
        least = max(least, probability)
    return np.where(probs >= least * (1 - 1e-12), probs, 0.0)


def draw_by_hand(logits: np.ndarray, spec: SampleSpec) -> set[int]:
    """The token, or the two between which the draw falls within float noise."""
    row = processed_by_hand(logits, spec)
    if spec.params.is_greedy:
        return set(np.flatnonzero(row >= row.max() - 1e-5).tolist())
    kept = kept_by_hand(row, spec.params)
    num_levels = 2  # Of a tree over VOCAB tokens.
    nodes = {0}
    for level in range(num_levels):
        size, u = WIDTH ** (num_levels - 1 - level), uniform_at(spec.params.seed, spec.position, level)
        nodes = {node * WIDTH + child for node in nodes for child in _children(kept, node * WIDTH * size, size, u)}
    return nodes


def _children(kept: np.ndarray, first: int, size: int, u: float) -> set[int]:
    """Where `u` falls among the masses of a node's children, of `size` tokens each; several within float noise."""
    masses = [kept[first + i * size : first + (i + 1) * size].sum() for i in range(WIDTH)]
    if sum(masses) == 0.0:
        return set()
    cumulative = np.cumsum(masses) / sum(masses)
    return {int(np.searchsorted(cumulative, min(max(x, 0.0), 1 - 1e-9), side="right")) for x in (u - 1e-6, u, u + 1e-6)}


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32))


@settings(max_examples=150, deadline=None)
@given(specs=st.lists(SPECS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_every_row_gets_the_token_that_the_slow_way_gives(specs: list[SampleSpec], seed: int) -> None:
    logits = random_logits(len(specs), seed)
    for token, row, spec in zip(sample_tokens(logits, specs, EOS), logits.numpy(), specs, strict=True):
        assert token in draw_by_hand(row, spec)


@settings(max_examples=50, deadline=None)
@given(specs=st.lists(SPECS, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_draws_the_same_alone_and_in_company(specs: list[SampleSpec], seed: int) -> None:
    logits = random_logits(len(specs), seed)
    together = sample_tokens(logits, specs, EOS)
    assert together == [sample_tokens(logits[i : i + 1], [spec], EOS)[0] for i, spec in enumerate(specs)]


def spec_of(position: int | None = None, output: tuple[int, ...] = (), **params: object) -> SampleSpec:
    position = 1 + len(output) if position is None else position
    return SampleSpec(params=ResolvedSampling(**params), position=position, prompt_ids=[1], output_ids=output)  # type: ignore[arg-type]


def test_raw_logits_are_left_alone() -> None:
    logits = random_logits(1, 0)
    before = logits.clone()
    sample_tokens(logits, [spec_of(logit_bias={1: 50.0}, repetition_penalty=2.0, min_new_tokens=2)], EOS)
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    drawn = sample_tokens(logits, [spec_of(position=i, seed=9) for i in range(4000)], frozenset())
    assert np.bincount(drawn, minlength=4) / 4000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_noise_of_a_millionth_changes_no_draw_of_a_large_vocabulary() -> None:
    # Of these draws most fall on tokens less likely than 1e-4.
    logits = random_logits(500, 3, vocab=30_000)
    specs = [spec_of(position=i, seed=1, temperature=0.8) for i in range(500)]
    noise = 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    assert sample_tokens(logits, specs, EOS) == sample_tokens(logits + noise, specs, EOS)


def test_the_smallest_temperature_is_as_good_as_greedy() -> None:
    logits = random_logits(20, 4)
    specs = [spec_of(position=i, temperature=1e-6) for i in range(20)]
    assert sample_tokens(logits, specs, EOS) == logits.argmax(-1).tolist()


def test_a_flat_row_is_ranked_beyond_the_best_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_HEAD", 4)
    flat, steep = torch.linspace(1.0, 1.1, VOCAB), torch.linspace(0.0, 80.0, VOCAB)
    specs = [spec_of(position=i, top_p=0.5) for i in range(100)]
    from_flat = sample_tokens(flat.expand(100, VOCAB), specs, EOS)
    assert min(from_flat) >= VOCAB // 2 - 1
    assert len(set(from_flat)) > 10
    assert set(sample_tokens(torch.stack((flat, steep)).repeat(50, 1), specs, EOS)[1::2]) == {VOCAB - 1}


def test_eos_and_stop_ids_wait_for_the_least_number_of_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 9], logits[0, 20] = 9.0, 8.0, 7.0

    def greedy(output: tuple[int, ...], **params: object) -> int:
        return sample_tokens(logits, [spec_of(output=output, temperature=0.0, stop_token_ids=(9,), **params)], EOS)[0]

    assert greedy((1,), min_new_tokens=2) == 20
    assert greedy((1, 1), min_new_tokens=2) == 3
    assert greedy((1,), min_new_tokens=2, ignore_eos=True) == 3


@pytest.mark.parametrize("params", [ResolvedSampling(temperature=0.0), ResolvedSampling(temperature=1.0, top_p=0.9)])
def test_a_row_that_is_not_numbers_has_no_token_whichever_way_it_is_drawn(params: ResolvedSampling) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 5] = torch.nan
    specs = [SampleSpec(params, 1, [1], ())] * 3
    first, none, last = sample_tokens(logits, specs, EOS)
    assert none == NO_TOKEN
    assert [first, last] == sample_tokens(logits[[0, 2]], specs[:2], EOS)
    assert NO_TOKEN not in (first, last)


def test_a_scored_row_that_is_not_numbers_is_an_error() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 5] = torch.nan
    with pytest.raises(EngineError, match="not numbers"):
        score(logits, [1, 1], [0, 0])
    assert len(score(logits[:1], [1], [0])) == 1


@given(counters=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=5))
def test_variates_of_a_batch_are_those_of_its_rows(counters: list[tuple[int, int]]) -> None:
    by_hand = [[uniform_at(seed, position, choice) for choice in range(4)] for seed, position in counters]
    assert variates_of(counters, 4).tolist() == by_hand


@pytest.mark.parametrize("vocab", [1, 2, 16, 17, 255, 256, 257, 5000])
def test_draws_from_a_tree_of_any_size_follow_the_distribution(vocab: int) -> None:
    weights = torch.arange(1, vocab + 1, dtype=torch.float64) ** 2
    drawn = descend(weights.expand(6000, vocab), [(11, i) for i in range(6000)])
    assert 0 <= drawn.min() <= drawn.max() < vocab
    # In tenths of the ids, as the vocabulary may be larger than the sample.
    tenths = torch.arange(vocab) * 10 // vocab
    expected = torch.zeros(10, dtype=torch.float64).index_add_(0, tenths, weights / weights.sum())
    assert torch.bincount(tenths[drawn], minlength=10).double() / 6000 == pytest.approx(expected, abs=0.03)


def test_a_token_without_mass_is_never_drawn() -> None:
    weights = torch.zeros(2000, 300, dtype=torch.float64)
    weights[:, [5, 31, 299]] = torch.tensor([1e-300, 1.0, 1e-3], dtype=torch.float64)
    assert set(descend(weights, [(i, 0) for i in range(2000)]).tolist()) == {31, 299}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_logprobs_and_ranks_do_not_depend_on_company_or_threads(threads: int) -> None:
    # More logits in one row than torch sums in one thread; rounded as in bfloat16, so that many are equal.
    logits = (torch.randn(6, 49_152, generator=torch.Generator().manual_seed(0)) * 3).bfloat16().float()
    num_top = [5, 0, 20, 5, 1, 5]
    alone = [score(logits[i : i + 1], [7 * i], [num_top[i]])[0] for i in range(6)]
    torch.set_num_threads(threads)
    assert score(logits, [7 * i for i in range(6)], num_top) == alone
    assert [score(logits[i : i + 1], [7 * i], [num_top[i]])[0] for i in range(6)] == alone
    for scored in alone:
        assert list(scored.top) == sorted(scored.top, key=lambda pair: -pair[1])
