"""Pipeline stages: the layers of a model on this rank, as one callable.

Every stage runs the model's own forward: what a model does before its layers (positions, masks, scaling of embeddings)
it does on every stage. `cut_stage` replaces the parts of other stages by placeholders (transformers' `pp_plan`). The
layer before the stage's first one becomes an `Entry`, which drops its input and returns the hidden states of the stage
before. The layer behind its last one becomes an `Exit`, which takes the hidden states out. Other absent layers return
their input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from splitserve.core.errors import ConfigError, EngineError
from splitserve.core.parallel import ParallelRank
from splitserve.engine.attention.base import StepAttention
from splitserve.engine.parallel.ranks import Ranks

if TYPE_CHECKING:
    from splitserve.engine.heads.states import HiddenStateTap


class Absent(torch.nn.Module):
    """Replacement of a layer, a norm, an embedding or a head on another stage: returns its input."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        # Attributes of a layer that models read without calling it, for example its type of attention.
        for name, value in vars(module).items():
            if isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states


class Entry(Absent):
    """Replacement of the layer before the stage's first one. `given`: output of the stage before, during a step."""

    given: torch.Tensor | None = None

    def forward(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        if self.given is None:
            raise EngineError("the model runs the layers of one pipeline stage twice")
        hidden, self.given = self.given, None
        return hidden


class Exit(Absent):
    """Replacement of the layer behind the stage's last one."""

    taken: torch.Tensor | None = None

    def forward(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self.taken = states
        return states


@dataclass(slots=True, eq=False)
class StageBounds:
    """The layers of one stage, and its boundaries in the model."""

    layers: range
    hidden_size: int
    # `entry` is None on the first stage, `exit` on the last one.
    entry: Entry | None
    exit: Exit | None
    # Capture of hidden states for a draft head. Set once, after the model was probed. None: there is no head.
    tap: HiddenStateTap | None = None

    def run(
        self,
        model: Any,
        given: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stage's layers and return hidden states [1, T, hidden_size].

        `given`: token ids [1, T] on the first stage, hidden states [1, T, hidden_size] on others. `ahead`: input of the
        part before the model's first layer, which every stage runs and only the first one needs; None: `given`.
        """
        first = given if ahead is None else ahead
        inputs = {"input_ids": first}
        if self.entry is not None:
            self.entry.given, inputs = given, {"inputs_embeds": first}
        out = model.base_model(**inputs, position_ids=positions, use_cache=False, step_attention=attention)
        if self.exit is None:
            hidden: torch.Tensor = out.last_hidden_state
            return hidden
        taken, self.exit.taken = self.exit.taken, None
        if taken is None:
            raise EngineError("the model does not run the layers of one pipeline stage")
        return taken

    def step(
        self,
        model: Any,
        ranks: Ranks,
        dtype: torch.dtype,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor | None:
        """Run the layers between the stages before and after. Return what `run_body` does; None: not the last stage."""
        given, tap = token_ids, self.tap
        if self.entry is not None:
            num_received = 0 if tap is None else tap.num_received
            given = ranks.receive((1 + num_received, token_ids.shape[1], self.hidden_size), dtype)
            given = given if tap is None else tap.unpack(given)
        hidden = self.run(model, given, positions, attention)
        if self.exit is None:
            return hidden[0]
        ranks.send(hidden if tap is None else tap.pack(hidden))
        return None


def cut_stage(model: Any, layers: range, rank: ParallelRank, name: str) -> StageBounds:
    """Remove the parts of other stages. Raises ConfigError."""
    hidden_size = int(model.config.get_text_config().hidden_size)
    if rank.pp_size == 1:
        return StageBounds(layers, hidden_size, None, None)
    before, path_of_layers, after = _pipeline_parts(model, name)
    held = model.base_model.get_submodule(path_of_layers)
    entry = exit_ = None
    for i, layer in enumerate(held):
        if i == layers.start - 1:
            held[i] = entry = Entry(layer)
        elif i == layers.stop:
            held[i] = exit_ = Exit(layer)
        elif i not in layers:
            held[i] = Absent(layer)
    absent = () if rank.is_first_stage else before
    if not rank.is_last_stage:
        absent = (*absent, *after)
        model.set_output_embeddings(Absent(model.get_output_embeddings()))
    for path in absent:
        model.base_model.set_submodule(path, Absent(model.base_model.get_submodule(path)))
    return StageBounds(layers, hidden_size, entry, exit_)


def _pipeline_parts(model: Any, name: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the names of the body's modules before its layers, of the list of layers, and of those behind."""
    prefix = f"{model.base_model_prefix}."
    names = [key.removeprefix(prefix) for key in model.pp_plan if key.startswith(prefix)]
    lists = [n for n in names if isinstance(model.base_model.get_submodule(n), torch.nn.ModuleList)]
    if len(lists) != 1:
        raise ConfigError(
            f"Model {name} cannot be cut into pipeline stages: transformers has no pp_plan for it that names its "
            "layers. Use tensor parallel ranks alone, or one rank."
        )
    at = names.index(lists[0])
    return tuple(names[:at]), lists[0], tuple(names[at + 1 :])
