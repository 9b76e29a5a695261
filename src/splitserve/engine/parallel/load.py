"""One rank's share of a model: built without memory, sharded, filled with its part of the weights, connected, probed.

1. transformers builds the whole model on the meta device; only buffers, which are small, are real.
2. `stages` and `plan` remove the parts of other ranks.
3. `checkpoint` reads the remaining weights.
4. Modules with sharded weights exchange what they must, by `ranks`.
5. `probe_share` finds the KV shapes of the share, as `engine/probe.py` does, and checks its results. A stage may need
   nothing but hidden states from the stages before it. Models with layers that exchange other data (embeddings that go
   to every layer, KV that later layers share) are rejected.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, GenerationConfig

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError, EngineError, clause
from splitserve.core.options import size_text
from splitserve.core.parallel import stage_layers
from splitserve.engine.attention.base import ATTENTION_NAME, AttentionParams, register_attention
from splitserve.engine.fit import cannot_cut
from splitserve.engine.parallel.checkpoint import Checkpoint, Translation, WeightLoader
from splitserve.engine.parallel.dp_attention import Meeting
from splitserve.engine.parallel.plan import Shards, cut_weights
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.stages import StageBounds, cut_stage
from splitserve.engine.probe import (
    PROBE_TOKENS,
    LayerShape,
    Recorder,
    attention_checked,
    check_class,
    check_numbers,
    probe,
    run_whole,
)

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
    # Set if each group of ranks serves requests of its own; None: all ranks serve the driver's.
    meeting: Meeting | None = None

    @property
    def step_ranks(self) -> Ranks:
        """Ranks that serve the same requests as this one."""
        return self.ranks if self.meeting is None else self.meeting.group


def load_share(
    folder: Path, config: Any, settings: ModelConfig, dtype: torch.dtype, ranks: Ranks, pp_layers: Sequence[int] = ()
) -> tuple[Any, ModelShare]:
    """Return the model, with this rank's part of the weights on the rank's device, and a description of that part.

    `config`: of transformers. With `settings.expert_parallel` each rank has some whole experts, not a part of each.
    With `settings.dp_attention` experts are divided over all `ranks`, and all other weights over the rank's group.
    Raises ConfigError or ModelLoadError.
    """
    name = settings.model
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"Model {name} has quantized weights, which cannot be cut over ranks: use one rank.")
    if settings.dp_attention and ranks.rank.pp_size > 1:
        raise ConfigError(f"Model {name} is to have pipeline stages and data parallel attention: choose one of them.")
    try:
        layers = stage_layers(config.get_text_config().num_hidden_layers, ranks.rank.pp_size, pp_layers)
    except ValueError as error:
        raise ConfigError(f"{clause(error)}.") from error
    with attention_checked(name):
        model = empty_model(folder, config, dtype)
    check_class(model, name)
    num_parameters = sum(p.numel() for p in model.parameters())
    translation = Translation(model)
    tie = TiedWeights.of(model)
    stage = cut_stage(model, layers[ranks.rank.pp_rank], ranks.rank, name)
    # Ranks over which all weights except the experts are divided.
    own = ranks.group if settings.dp_attention else ranks
    assert own is not None
    meeting = Meeting(ranks, own) if settings.dp_attention else None
    experts = ranks.rank if settings.dp_attention else None
    shards = cut_weights(model, own.rank, name, expert_parallel=settings.expert_parallel, experts=experts)
    with closing(Checkpoint(folder)) as checkpoint:
        tie.load(WeightLoader(model, checkpoint, shards.cuts, ranks.device), translation, model)
        share = ModelShare(ranks, stage, shards, num_parameters, checkpoint.bytes_read, meeting)
    model.to(ranks.device).requires_grad_(False).eval()
    shards.connect(model, own, meeting)
    logger.info(
        "rank %d of %d has layers %d to %d of %s and read %s of its weights",
        ranks.rank.index,
        ranks.rank.group_size,
        stage.layers.start,
        stage.layers.stop - 1,
        name,
        size_text(share.bytes_read),
    )
    return model, share


def load_ends(folder: Path, model: Any, dtype: torch.dtype, device: torch.device, *, has_head: bool) -> Any:
    """Return the model in `folder` without layers: its embedding, last norm and language head, all whole.

    `model`: this rank's share of it. `has_head`: whether the language head is needed; if not, it is not read.
    """
    ends = empty_model(folder, model.config, dtype)
    translation, tie = Translation(ends), TiedWeights.of(ends)
    ends.base_model.layers = torch.nn.ModuleList()
    if not has_head:
        ends.set_output_embeddings(torch.nn.Identity())
    with closing(Checkpoint(folder)) as checkpoint:
        tie.load(WeightLoader(ends, checkpoint, {}, device), translation, ends)
    return ends.to(device).requires_grad_(False).eval()


def empty_model(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """Return a model with weights on the meta device and real buffers."""
    register_attention()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    # Moving the weights to the meta device has separated tied ones.
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """Names of the head's and the embedding's weight if they are tied; both are empty if not."""

    embedding: str
    head: str

    @classmethod
    def of(cls, model: Any) -> TiedWeights:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        # A quantized head may have no tensor of this name.
        if getattr(head, "weight", None) is not embedding.weight:
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


def probe_share(model: Any, share: ModelShare, name: str) -> tuple[LayerShape, ...]:
    """Return the shapes of this rank's layers, in order. All ranks of a stage call it together.

    Raises ModelLoadError or ConfigError.
    """
    found = probe(model, name, layers=share.stage.layers, run=functools.partial(_run, share))
    return tuple(_with_heads(shape, share, name) for shape in found)


def _with_heads(shape: LayerShape, share: ModelShare, name: str) -> LayerShape:
    heads = share.shards.kv_heads.get(shape.layer)
    if heads is None:
        return shape
    if shape.num_kv_heads != len(heads.held):
        raise cannot_cut(
            name,
            f"layer {shape.layer} has {shape.num_kv_heads} KV heads on this rank where {len(heads.held)} were expected",
        )
    return replace(shape, first_kv_head=heads.held.start, total_kv_heads=heads.total)


def _run(share: ModelShare, model: Any, recorder: Recorder) -> None:
    stage = share.stage
    if share.meeting is not None:
        share.meeting.begin([PROBE_TOKENS] * share.meeting.num_groups)
    if stage.entry is None and stage.exit is None:
        run_whole(model, recorder)
        return
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    sent = _noise(share, model, seed=0)
    with torch.inference_mode():
        given = torch.zeros_like(positions) if stage.entry is None else sent
        hidden = stage.run(model, given, positions, recorder)
        if (hidden.shape, hidden.dtype) != (sent.shape, sent.dtype):
            raise EngineError("its layers hand on something else than hidden states")
        check_numbers(hidden)
        if stage.entry is not None:
            ahead = [_noise(share, model, seed) for seed in (1, 2)]
            one, other = (stage.run(model, sent, positions, _Mixture(), ahead=a) for a in ahead)
            if not torch.equal(one, other):
                raise EngineError("its layers need more of the layers before them than hidden states")
    if stage.exit is None and stage.entry is not None:
        # Set again for this run, because the first run has used it.
        stage.entry.given = sent
        run_whole(model, Recorder(), inputs_embeds=sent)


def _noise(share: ModelShare, model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, PROBE_TOKENS, share.stage.hidden_size, generator=generator)
    return noise.to(device=model.device, dtype=model.dtype)


class _Mixture:
    """StepAttention with an output that depends on each of its inputs."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        seen = (value + key.mean(-1, keepdim=True)).repeat_interleave(group, dim=1)
        return seen + params.scaling * query.mean(-1, keepdim=True)
