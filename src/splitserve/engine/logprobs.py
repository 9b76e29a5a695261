"""Logprobs of given tokens under the model's own distribution: before bias, penalties, masks and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from splitserve.core.batch import SampleSpec, TokenLogprob
from splitserve.core.errors import EngineError
from splitserve.engine.sampler import NO_TOKEN, NOT_NUMBERS
from splitserve.engine.upload import to_device


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprob of token_ids[i] in row i of raw logits [n, vocab_size], with the row's num_top[i] best.

    Raises EngineError on NaN.
    """
    if not token_ids:
        return []
    log_z = logits.logsumexp(-1, keepdim=True)
    chosen = to_device(np.array(token_ids, np.int64), logits.device).unsqueeze(-1)
    logprobs = (logits.gather(-1, chosen) - log_z).squeeze(-1).tolist()
    if any(map(math.isnan, logprobs)):
        raise EngineError(NOT_NUMBERS)
    widest = min(max(num_top), logits.shape[-1])
    values, ids = logits.topk(widest, dim=-1)
    top_logprobs, top_ids = (values - log_z).tolist(), ids.tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids[i][:n], top_logprobs[i][:n], strict=True)))
        for i, (token, logprob, n) in enumerate(zip(token_ids, logprobs, num_top, strict=True))
    ]


def score_drawn(logits: torch.Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]) -> list[TokenLogprob | None]:
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
