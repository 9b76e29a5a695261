"""Sampling of the next token of every row, vectorised over the batch, and the logprobs of tokens.

1. `adjust` applies bias, penalties and the min-tokens mask. Each changes few tokens of few rows: the host collects them
   as (row, token, amount) triples over the whole batch, and the device applies each kind in one operation. `forbid`
   applies the grammars' bitmask (`bitmask.py`).
2. Greedy rows take the largest logit. A batch of only greedy rows ends here.
3. The others become probabilities at their temperature, in float64.
4. top-k, top-p and min-p each become a minimum probability in that same distribution; the highest minimum counts.
   Tokens of equal probability are kept or dropped together, so nothing depends on how a sort breaks ties.
5. `descend` finds the token in a tree over the vocabulary, WIDTH children per node, in the order of token ids. From the
   root down, each node's child is chosen by the children's masses and a variate of its own, from (seed, position).

A single cumulative sum over all tokens would need one variate only. But any change of a likely token's probability
shifts everything behind it: noise of 1e-6 moves the boundaries between unlikely tokens by more than their width. In the
tree it moves a few boundaries per level, by about its own size.

All of it runs on the logits' device. The host waits for it once, for the tokens. If a row has top-p, it waits once
more, to check whether the row's best tokens have enough mass. So a sample, and a logprob, depends on the row's logits,
its seed and its position alone, to the last bit. In float32 the logits have noise that depends on the rest of the
batch. Because it is small, it rarely changes a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from splitserve.core.batch import SampleSpec, TokenLogprob, TopLogprobs
from splitserve.core.errors import EngineError
from splitserve.core.sampling import ResolvedSampling, mix64
from splitserve.engine.bitmask import Bitmask, forbid
from splitserve.engine.inputs import to_device

WIDTH = 16


def descend(probs: torch.Tensor, counters: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sample a token from each row of `probs` [n, vocab_size]. `counters`: (seed, position) of each row. [n], int64

    Rows need not sum to 1. A row of NaN gets any token.
    """
    levels = _levels(probs)
    variates = to_device(variates_of(counters, len(levels)), probs.device)
    rows = torch.arange(len(probs), device=probs.device)
    node = torch.zeros_like(rows)
    for choice, children in enumerate(reversed(levels)):
        # Only NaN leads behind the last node.
        cumulative = children[rows, node.clamp(max=children.shape[1] - 1)].cumsum(-1)
        total = cumulative[:, -1:]
        target = variates[:, choice, None] * total
        # Rounding must not raise the target to the total, behind the last child.
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
        node = node * WIDTH + torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return node.clamp(max=probs.shape[-1] - 1)


def variates_of(counters: Sequence[tuple[int, int]], num_choices: int) -> npt.NDArray[np.float64]:
    """Return variates in [0, 1), [n, num_choices]: 53 bits of `mix64(mix64(seed, position), choice)` each."""
    states = np.array([mix64(*counter) for counter in counters], np.uint64)[:, None]
    z = states + np.arange(1, num_choices + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    variates: npt.NDArray[np.float64] = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return variates


def _levels(probs: torch.Tensor) -> list[torch.Tensor]:
    """Return the masses of the children of each node, [n, nodes, WIDTH]; the leaves' parents first, the root last."""
    levels: list[torch.Tensor] = []
    masses = probs
    while not levels or masses.shape[-1] > 1:
        masses = pad(masses, (0, -masses.shape[-1] % WIDTH)).view(len(probs), -1, WIDTH)
        levels.append(masses)
        masses = masses.sum(-1)
    return levels


# (row, tokens, amounts) triples. No (row, token) may occur twice.
_Entries = list[tuple[int, np.ndarray, np.ndarray | float]]


def _change(
    logits: torch.Tensor, entries: _Entries, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return logits with change(value, amount) in place of each listed value."""
    if not entries:
        return logits
    amounts_of = [np.broadcast_to(np.asarray(amounts, np.float32), len(tokens)) for _, tokens, amounts in entries]
    columns = (
        np.concatenate([np.full(len(tokens), row, dtype=np.int64) for row, tokens, _ in entries]),
        np.concatenate([tokens.astype(np.int64) for _, tokens, _ in entries]),
        np.concatenate(amounts_of),
    )
    rows, tokens, amounts = (to_device(column, logits.device) for column in columns)
    return logits.index_put((rows, tokens), change(logits[rows, tokens], amounts))


def _penalize(value: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return torch.where(value > 0, value / penalty, value * penalty)


def adjust(logits: torch.Tensor, specs: Sequence[SampleSpec], eos_token_ids: frozenset[int]) -> torch.Tensor:
    """Return a copy of logits [n, vocab_size] with `specs[i]` applied to row i, in the order of SamplingParams."""
    bias: _Entries = []
    repetition: _Entries = []
    occurrence: _Entries = []
    masked: _Entries = []
    for row, spec in enumerate(specs):
        p = spec.params
        if p.logit_bias:
            bias.append((row, np.array(list(p.logit_bias)), np.array(list(p.logit_bias.values()))))
        if p.repetition_penalty != 1.0:
            repetition.append((row, np.unique([*spec.prompt_ids, *spec.output_ids]), p.repetition_penalty))
        if (p.frequency_penalty or p.presence_penalty) and spec.output_ids:
            tokens, counts = np.unique(spec.output_ids, return_counts=True)
            occurrence.append((row, tokens, counts * p.frequency_penalty + p.presence_penalty))
        # With a grammar the bitmask does this (bitmask.py), because a complete grammar must be able to end.
        if spec.num_output_tokens < p.min_new_tokens and spec.grammar is None:
            ending = set(p.stop_token_ids) | (set() if p.ignore_eos else eos_token_ids)
            masked.append((row, np.array(sorted(ending)), 0.0))
    logits = _change(logits, bias, torch.add)
    logits = _change(logits, repetition, _penalize)
    logits = _change(logits, occurrence, torch.sub)
    return _change(logits, masked, lambda value, _: torch.full_like(value, -torch.inf))


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprob of token_ids[i] in row i of raw logits [n, vocab_size], with the row's num_top[i] best.

    Raises EngineError on NaN.
    """
    if not token_ids:
        return []
    # Not logsumexp: with several threads it sums a single row in another order than a row of many.
    logprobs = logits.log_softmax(-1)
    chosen = to_device(np.array(token_ids, np.int64), logits.device).unsqueeze(-1)
    own = logprobs.gather(-1, chosen).squeeze(-1).tolist()
    if any(map(math.isnan, own)):
        raise EngineError(NOT_NUMBERS)
    top = _top_logprobs(logits, logprobs, num_top)
    return [TokenLogprob(token, own[i], top[i]) for i, token in enumerate(token_ids)]


def _top_logprobs(logits: torch.Tensor, logprobs: torch.Tensor, num_top: Sequence[int]) -> list[TopLogprobs]:
    """Return the num_top[i] best tokens of row i.

    The order of equal logits depends on how many tokens topk returns. So it never returns more than a row requests.
    """
    found: list[TopLogprobs] = [()] * len(num_top)
    for count in set(num_top) - {0}:
        members = [i for i, n in enumerate(num_top) if n == count]
        rows = to_device(np.array(members), logits.device)
        ids = logits[rows].topk(min(count, logits.shape[-1]), dim=-1).indices
        values = logprobs[rows].gather(-1, ids).tolist()
        for i, own_ids, own_values in zip(members, ids.tolist(), values, strict=True):
            found[i] = tuple(zip(own_ids, own_values, strict=True))
    return found


def score_sampled(
    logits: torch.Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]
) -> list[TokenLogprob | None]:
    """Return the logprob of each row's token; None if not requested, or if there is no token."""
    asked = [i for i, spec in enumerate(specs) if spec.return_logprob and tokens[i] != NO_TOKEN]
    found: list[TokenLogprob | None] = [None] * len(specs)
    if asked:
        rows = logits[to_device(np.array(asked), logits.device)]
        for i, logprob in zip(
            asked, score(rows, [tokens[i] for i in asked], [specs[i].num_top_logprobs for i in asked]), strict=True
        ):
            found[i] = logprob
    return found


# Best probabilities to check for top-p before the whole row is sorted; nearly always they have enough mass.
_HEAD = 1024
# Token of a row if its logits are NaN, and the error text for it.
NO_TOKEN = -1
NOT_NUMBERS = "the logits are not numbers. Serve the model with dtype bfloat16 or float32"


def sample_tokens(
    logits: torch.Tensor, specs: Sequence[SampleSpec], eos_token_ids: frozenset[int], bitmask: Bitmask | None = None
) -> list[int]:
    """Return the next token of each row of raw logits [n, vocab_size], float32; `specs[i]` is of row i. NaN: NO_TOKEN.

    `bitmask`: tokens that the rows' grammars allow; None only if no row has a grammar.
    """
    raw, logits = logits, adjust(logits, specs, eos_token_ids)
    if bitmask is not None:
        logits = forbid(logits, specs, bitmask)
    random = [i for i, spec in enumerate(specs) if not spec.params.is_greedy]
    if logits is raw and not random and logits.device.type == "cpu":
        return _greedy_on_host(logits)
    is_broken = raw.amax(-1).isnan()
    tokens = _greedy_tokens(logits)
    if random:
        rows = to_device(np.array(random), logits.device)
        tokens = tokens.index_copy(0, rows, _draw_random(logits.index_select(0, rows), [specs[i] for i in random]))
    # One transfer to the host returns both.
    sampled: list[int] = tokens.masked_fill(is_broken, NO_TOKEN).tolist()
    return sampled


def _greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return a token with the largest logit of each row; on CPUs the first."""
    # numpy takes a fifth of torch's time.
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _greedy_on_host(logits: torch.Tensor) -> list[int]:
    """Return what `sample_tokens` does, in less time: after a step no code of torch is in the CPU's caches."""
    rows = logits.numpy()
    # NaN counts as the largest.
    return [NO_TOKEN if math.isnan(row[i]) else i for row, i in zip(rows, rows.argmax(-1).tolist(), strict=True)]


def _draw_random(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    params = [spec.params for spec in specs]
    temperature = _column([p.temperature for p in params], logits.device)
    # The largest logit is subtracted first: the smallest temperature must not overflow.
    scores = logits.double()
    probs = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
    least = _least_probability(probs, params)
    if least is not None:
        probs = probs.masked_fill(probs < least, 0.0)
    return descend(probs, [(spec.params.seed, spec.position) for spec in specs])


def _least_probability(probs: torch.Tensor, params: Sequence[ResolvedSampling]) -> torch.Tensor | None:
    """Return the minimum probability of a kept token of each row, [n, 1]; None if no row filters."""
    vocab_size = probs.shape[-1]
    ranked = [i for i, p in enumerate(params) if 1 <= p.top_k < vocab_size or p.top_p < 1.0]
    if not ranked and not any(p.min_p for p in params):
        return None
    least = probs.amax(-1, keepdim=True) * _column([p.min_p for p in params], probs.device)
    if ranked:
        rows = to_device(np.array(ranked), probs.device)
        by_rank = _least_by_rank(probs.index_select(0, rows), [params[i] for i in ranked])
        least.index_copy_(0, rows, torch.maximum(least.index_select(0, rows), by_rank))
    return least


def _least_by_rank(probs: torch.Tensor, params: Sequence[ResolvedSampling]) -> torch.Tensor:
    """Return the probability of the last token that top-k and top-p keep. [n, 1]"""
    vocab_size, device = probs.shape[-1], probs.device
    counts = [min(p.top_k, vocab_size) if p.top_k >= 1 else vocab_size for p in params]
    top_k = to_device(np.array(counts), device)
    top_p = _column([p.top_p for p in params], device)
    head = min(vocab_size, max(_HEAD, *(p.top_k for p in params if p.top_k < vocab_size), 0))
    best = probs.topk(head, dim=-1).values
    least = _last_kept(best, top_k, top_p)
    # Rows where the best tokens together do not reach top-p. Not needed if top-k keeps no more tokens than these.
    short = ((best.cumsum(-1)[:, -1] < top_p[:, 0]) & (top_p[:, 0] < 1.0) & (top_k > head)).nonzero()[:, 0]
    if len(short):
        ranked = probs.index_select(0, short).sort(dim=-1, descending=True).values
        least.index_copy_(0, short, _last_kept(ranked, top_k[short], top_p[short]))
    return least


def _last_kept(best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the last of the falling probabilities [n, width] that is within top_k [n] and top_p [n, 1]. [n, 1]"""
    # The smallest set with a mass of top_p: every token with less than top_p before it.
    by_mass = (best.cumsum(-1) < top_p).sum(-1) + 1
    by_mass = by_mass.masked_fill(top_p[:, 0] >= 1.0, best.shape[-1])
    count = torch.minimum(by_mass, top_k).clamp(max=best.shape[-1])
    return best.gather(-1, count.unsqueeze(-1) - 1)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, np.float64), device).unsqueeze(-1)
