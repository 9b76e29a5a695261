"""The draft model of a worker: which of its ranks load it, and which part.

Tokens are sampled on the driver, so the draft model is there, too:

one rank             It is whole.
tensor parallel      The ranks share it as they share the served model. If it cannot be sharded over as many ranks, the
                     driver has it whole: it is small.
pipeline stages      The driver has it whole. So it can propose tokens while steps of other requests are in flight.
data parallel        It is whole on the driver of each group of ranks, because each proposes for requests of its own.
attention
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.engine.draft_fit import check_vocabulary
from splitserve.engine.fingerprint import model_fingerprint
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.parallel.load import ModelShare
from splitserve.engine.sources import resolve_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """This rank's part of a draft model or head."""

    # The same on all ranks: peers compare it with each rank.
    fingerprint: str
    # None: only another rank computes it.
    loaded: LoadedModel | None
    # Width of a head's states, the same on all ranks. 0: it is a model.
    state_size: int = 0


def load_draft(name: str, settings: ModelConfig, target: LoadedModel) -> LoadedDraft:
    """Load the draft model with the device, dtype and context of `target`, which has the settings `settings`.

    All ranks call it. Raises ModelLoadError or ConfigError.
    """
    settings = msgspec.structs.replace(
        settings,
        model=name,
        context_length=target.context_length,
        dtype=target.dtype_name,
        expert_parallel=False,
        dp_attention=False,
    )
    draft = _load_on_its_ranks(settings, target.share)
    if draft is None:
        return LoadedDraft(model_fingerprint(resolve_model(name)), None)
    check_vocabulary(name, draft.vocab_size, target.name, target.vocab_size)
    return LoadedDraft(draft.fingerprint, draft)


def _load_on_its_ranks(settings: ModelConfig, share: ModelShare | None) -> LoadedModel | None:
    """Return this rank's part. None: it has none. `share`: of the served model."""
    if share is None:
        return load_model(settings)
    rank = share.step_ranks.rank
    if share.meeting is None and rank.pp_size == 1:
        try:
            return load_model(settings, share.ranks)
        except ConfigError as error:
            # It follows from sizes and settings, so all ranks raise it.
            if rank.is_driver:
                logger.warning("one rank computes the draft model %s: %s", settings.model, error.message)
    return load_model(settings) if rank.is_driver else None
