"""Load of a rank's models: the served one, and its draft model or draft head. At startup, and again while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.core.config import ModelConfig
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine.draft_model import LoadedDraft, load_draft
from splitserve.engine.heads.load import load_head
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a rank loads. If several ranks compute the model, all call each method together.

    Methods raise ModelLoadError, ConfigError or RanksLostError.
    """

    # This rank and the others. None: it computes the model alone.
    ranks: Ranks | None = None
    # Layers of each pipeline stage. Empty: as even as possible.
    pp_layers: Sequence[int] = ()
    # Checkpoint of the draft model or head. None: there is none, or the head is in the checkpoint of the model.
    draft_model: str | None = None
    # Kind of the draft head. None: there is no head.
    draft_head: SpeculativeAlgorithm | None = None

    def load(self, config: ModelConfig, check_share: Callable[[Any], None] | None = None) -> LoadedModel:
        """Load the served model. `check_share`: as in `load_model`."""
        return load_model(config, self.ranks, self.pp_layers, check_share)

    def load_draft(self, config: ModelConfig, loaded: LoadedModel) -> LoadedDraft | None:
        """Load the draft for `loaded`, which was loaded with `config`. None: the worker has none."""
        if self.draft_head is not None:
            return load_head(self.draft_head, self.draft_model, loaded)
        return None if self.draft_model is None else load_draft(self.draft_model, config, loaded)
