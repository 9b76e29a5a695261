"""Sampling from a distribution over a vocabulary, such that float noise hardly ever changes the sampled token.

The tokens are the leaves of a tree, WIDTH children per node, in the order of their ids. From the root down, each node's
child is chosen by the children's masses and a variate of its own.

A single cumulative sum over all tokens would need one variate only. But any change of a likely token's probability
shifts everything behind it: noise of 1e-6 moves the boundaries between unlikely tokens by more than their width. Here
it moves a few boundaries per level, by about its own size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from splitserve.core.sampling import mix64
from splitserve.engine.upload import to_device

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
    """Return `core.sampling.uniform_at` of each counter and choice. [n, num_choices]"""
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
