"""One rank's share of a model: built without memory, sharded, filled with its part of the weights, connected.

1. transformers builds the whole model on the meta device; only buffers, which are small, are real.
2. `plan` removes the parts of other ranks.
3. `checkpoint` reads the remaining weights.
4. Modules with sharded weights exchange what they must, by `ranks`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, GenerationConfig

from splitserve.core.errors import ConfigError, clause
from splitserve.core.parallel import stage_layers
from splitserve.engine.attention import bridge
from splitserve.engine.parallel.body import StageBody, StageBounds, WholeBody
from splitserve.engine.parallel.checkpoint import Checkpoint, Translation, WeightLoader
from splitserve.engine.parallel.meeting import Meeting
from splitserve.engine.parallel.plan import Shards, cut_experts, cut_stage, cut_weights
from splitserve.engine.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelShare:
    """This rank's part of a model, and the ranks it computes with."""

    ranks: Ranks
    stage: StageBounds
    shards: Shards
    # Parameters of the whole model.
    num_parameters: int
    # Bytes read from the safetensors files.
    bytes_read: int
    # Set if each rank serves requests of its own; None: all ranks serve the driver's.
    meeting: Meeting | None = None

    def body(self, model: Any, dtype: torch.dtype) -> StageBody | WholeBody:
        if self.meeting is not None:
            return WholeBody(model)
        return StageBody(model, self.stage, self.ranks, dtype)


def load_share(
    folder: Path,
    config: Any,
    name: str,
    dtype: torch.dtype,
    ranks: Ranks,
    pp_layers: Sequence[int] = (),
    *,
    expert_parallel: bool = False,
    dp_attention: bool = False,
) -> tuple[Any, ModelShare]:
    """Return the model, with this rank's part of the weights on the rank's device, and a description of that part.

    `expert_parallel`: each rank has some experts whole, not a part of each. `dp_attention`: as `expert_parallel`, and
    all other weights are whole. Raises ConfigError or ModelLoadError.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"Model {name} has quantized weights, which cannot be cut over ranks: use one rank.")
    model = _empty_model(folder, config, dtype)
    num_parameters = sum(p.numel() for p in model.parameters())
    translation = Translation(model)
    tie = _Tie.of(model)
    stage = cut_stage(model, _layers(config, ranks, pp_layers), ranks.rank, name)
    meeting = _meeting(ranks, name) if dp_attention else None
    if meeting is not None:
        shards = cut_experts(model, ranks.rank, name)
    else:
        shards = cut_weights(model, ranks.rank, name, expert_parallel=expert_parallel)
    with closing(Checkpoint(folder)) as checkpoint:
        tie.load(WeightLoader(model, checkpoint, shards.cuts, ranks.device), translation, model)
        share = ModelShare(ranks, stage, shards, num_parameters, checkpoint.bytes_read, meeting)
    model.to(ranks.device).requires_grad_(False).eval()
    if meeting is not None:
        shards.meet(meeting, ranks)
    else:
        shards.connect(model, ranks)
    logger.info(
        "rank %d of %d has layers %d to %d of %s and read %.1f MB of its weights",
        ranks.rank.index,
        ranks.rank.group_size,
        stage.layers.start,
        stage.layers.stop - 1,
        name,
        share.bytes_read / 1e6,
    )
    return model, share


def _meeting(ranks: Ranks, name: str) -> Meeting:
    if ranks.rank.pp_size > 1:
        raise ConfigError(f"Model {name} is to have pipeline stages and data parallel attention: choose one of them.")
    return Meeting(ranks)


def _empty_model(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    bridge.register()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=bridge.ATTENTION_NAME)
    # Moving the weights to the meta device has separated tied ones.
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _layers(config: Any, ranks: Ranks, pp_layers: Sequence[int]) -> range:
    try:
        stages = stage_layers(config.get_text_config().num_hidden_layers, ranks.rank.pp_size, pp_layers)
    except ValueError as error:
        raise ConfigError(f"{clause(error)}.") from error
    return stages[ranks.rank.pp_rank]


@dataclass(frozen=True, slots=True)
class _Tie:
    """Names of the head's and the embedding's weight if they are tied; both are empty if not."""

    embedding: str
    head: str

    @classmethod
    def of(cls, model: Any) -> _Tie:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            return cls("", "")
        paths = {module: path for path, module in model.named_modules()}
        return cls(f"{paths[embedding]}.weight", f"{paths[head]}.weight")

    def load(self, loader: WeightLoader, translation: Translation, model: Any) -> None:
        """Load the weights of a model; this rank may have the head, the embedding, both or none."""
        held = model.state_dict(keep_vars=True)
        if self.head not in held:
            loader.load(translation)
        elif self.embedding not in held:
            loader.load(translation, renamed={self.embedding: self.head}, without={self.head})
        else:
            loader.load(translation, without={self.head})
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
