"""Sampling of the next token of every row, vectorised over the batch.

1. `adjust` applies bias, penalties and the min-tokens mask (logits.py), `forbid` the grammars' bitmask (bitmask.py).
2. Greedy rows take the largest logit. A batch of only greedy rows ends here.
3. The others become probabilities at their temperature, in float64.
4. top-k, top-p and min-p each become a minimum probability in that same distribution; the highest minimum counts.
   Tokens of equal probability are kept or dropped together, so nothing depends on how a sort breaks ties.
5. The token is found in a tree over the vocabulary (tree.py), with uniform variates of (seed, position).

All of it runs on the logits' device. The host waits for it once, for the tokens. If a row has top-p, it waits once
more, to check whether the row's best tokens have enough mass.

So a sample depends on seed, position and distribution alone, not on the rest of the batch. Float noise does depend on
the batch, but because it is small it rarely changes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from splitserve.core.batch import SampleSpec
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.bitmask import Bitmask, forbid
from splitserve.engine.logits import adjust
from splitserve.engine.tree import descend
from splitserve.engine.upload import to_device

# Best probabilities to check for top-p before the whole row is sorted; nearly always they have enough mass.
_HEAD = 1024
# Token of a row if its logits are NaN, and the error text for it.
NO_TOKEN = -1
NOT_NUMBERS = "the logits are not numbers. Serve the model with dtype bfloat16 or float32"


def draw(
    logits: torch.Tensor, specs: Sequence[SampleSpec], eos_token_ids: frozenset[int], bitmask: Bitmask | None = None
) -> list[int]:
    """Return the next token of each row of raw logits [n, vocab_size], float32; `specs[i]` is of row i. NaN: NO_TOKEN.

    `bitmask`: tokens that the rows' grammars allow; None only if no row has a grammar.
    """
    is_broken = logits.amax(-1).isnan()
    logits = adjust(logits, specs, eos_token_ids)
    if bitmask is not None:
        logits = forbid(logits, specs, bitmask)
    tokens = logits.argmax(-1)
    random = [i for i, spec in enumerate(specs) if not spec.params.is_greedy]
    if random:
        rows = to_device(np.array(random), logits.device)
        tokens = tokens.index_copy(0, rows, _draw_random(logits.index_select(0, rows), [specs[i] for i in random]))
    # One transfer to the host returns both.
    drawn: list[int] = tokens.masked_fill(is_broken, NO_TOKEN).tolist()
    return drawn


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
    short = ((best.sum(-1) < top_p[:, 0]) & (top_p[:, 0] < 1.0) & (top_k > head)).nonzero()[:, 0]
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
