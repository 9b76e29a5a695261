"""The layers of a model that this rank has, as one call.

Between what comes in and what goes out of a stage lies the model's own forward: whatever a model does before its layers
(positions, masks, scaling of embeddings) it does on every stage. At the place of the layer before the stage's first one
what it has made of its input is thrown away for the hidden states of the stage before; at the place of the one after
its last they are taken out. Places of other layers hand on what they get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from splitserve.engine.attention.base import StepAttention
from splitserve.engine.parallel.ranks import Ranks
from splitserve.errors import EngineError


class Body(Protocol):
    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor | None:
        """Token ids and positions [1, T] of a step; the hidden states [T, hidden_size] behind the model's last layer,
        None where another rank has that. Stores the tokens' KV on the way."""
        ...


class Place(torch.nn.Module):
    """In the place of a layer that another stage has."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        # What models read of a layer beside calling it, its type of attention for one.
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states


class Entry(Place):
    """Just before the stage's first layer. `given` is what the stage before sent, while a step is under way."""

    given: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        if self.given is None:
            raise EngineError("the model runs the layers of one pipeline stage twice")
        hidden, self.given = self.given, None
        return hidden


class Exit(Place):
    """Just behind the stage's last layer."""

    taken: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self.taken = hidden_states
        return hidden_states


class Absent(torch.nn.Module):
    """In the place of a norm or an embedding that another stage has."""

    def forward(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the layers of one stage begin and end in the model."""

    layers: range
    hidden_size: int
    # None on the first stage, None on the last one.
    entry: Entry | None
    exit: Exit | None

    def run(
        self,
        model: Any,
        given: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The stage's layers, over token ids [1, T] on the first stage, hidden states [1, T, hidden_size] on others;
        returns hidden states [1, T, hidden_size].

        `ahead`: what goes through that part of the model before its first layer which every stage has, and is thrown
        away on all but the first; None: `given`, since it does not matter.
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


class WholeBody:
    """Body of a model that is on this rank from its first layer to its last."""

    def __init__(self, model: Any) -> None:
        self._model = model.base_model

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        out = self._model(input_ids=token_ids, position_ids=positions, use_cache=False, step_attention=attention)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


class StageBody:
    """Body of one stage among several: it hears from the one before and sends to the one after."""

    def __init__(self, model: Any, stage: Stage, ranks: Ranks, dtype: torch.dtype) -> None:
        self._model = model
        self._stage = stage
        self._ranks = ranks
        self._dtype = dtype

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor | None:
        given = token_ids
        if self._stage.entry is not None:
            given = self._ranks.receive((*token_ids.shape, self._stage.hidden_size), self._dtype)
        hidden = self._stage.run(self._model, given, positions, attention)
        if self._stage.exit is None:
            return hidden[0]
        self._ranks.send(hidden)
        return None
