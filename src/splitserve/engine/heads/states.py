"""Capture of the served model's hidden states during a step, for a draft head.

The head reads the outputs of some decoder layers, or the final states: those behind the last norm. Hooks store them
while the model runs. Our kernels run a decoder of equal layers in one call (`kernels/stack.py`), so the layers are
divided into several such decoders, each up to a layer that is read.

With pipeline stages each stage captures the states of its own layers. It sends them with its output, together with
those that it has received, so that the last stage has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from splitserve.core.errors import EngineError, UnsupportedModelError
from splitserve.engine.kernels.stack import DecoderStack


class HiddenStateTap:
    """Hidden states of the last step of one model. Not for two threads at a time."""

    def __init__(self, model: Any, after_layers: Sequence[int], held: range | None = None) -> None:
        """Add hooks to `model`, a causal LM. Raises ModelLoadError if it has no such layers.

        `after_layers`: layers with outputs to capture; empty: the final states. `held`: layers of this pipeline stage;
        None: all.
        """
        # By layer, [T, width] each.
        self._found: dict[int, torch.Tensor] = {}
        self._order = tuple(after_layers) or (-1,)
        # Layers with states that the stage before sends.
        self._received: list[int] = []
        if not after_layers:
            model.base_model.register_forward_hook(lambda _module, _args, out: self._keep(-1, out.last_hidden_state))
            return
        for layer, module in _modules_ending_at(model, sorted(set(after_layers))).items():
            if held is None or layer in held:
                module.register_forward_hook(lambda _module, _args, out, layer=layer: self._keep(layer, out))
            elif layer < held.start:
                self._received.append(layer)

    @property
    def num_received(self) -> int:
        """Return how many states of earlier layers arrive with the output of the stage before."""
        return len(self._received)

    def unpack(self, arrived: torch.Tensor) -> torch.Tensor:
        """Store the states that arrived [1 + num_received, T, width], and return the stage's input [1, T, width]."""
        self._found = dict(zip(self._received, arrived[1:], strict=True))
        return arrived[:1]

    def pack(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the next stage is to receive: the stage's output [1, T, width], and all states so far."""
        found, self._found = self._found, {}
        return torch.cat([hidden, *(found[layer][None] for layer in sorted(found) if layer >= 0)])

    def take(self) -> torch.Tensor:
        """Return the captured states [T, sum of widths] of the last step, and drop them. Raises EngineError."""
        found, self._found = self._found, {}
        if len(found) != len(set(self._order)):
            raise EngineError("the served model's hidden states were not captured in this step")
        return torch.cat([found[layer] for layer in self._order], dim=-1)

    def _keep(self, layer: int, out: Any) -> None:
        states = out[0] if isinstance(out, tuple) else out
        # Our kernels overwrite the states of a layer with those of the next.
        self._found[layer] = states[0].clone() if layer >= 0 else states[0]


def _modules_ending_at(model: Any, layers: Sequence[int]) -> dict[int, torch.nn.Module]:
    """Return the modules with outputs that are those of `layers`, by layer."""
    modules = getattr(model.base_model, "layers", None)
    num_layers = model.config.get_text_config().num_hidden_layers
    if not isinstance(modules, torch.nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of layers for a draft head to read: choose mtp or draft."
        )
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise UnsupportedModelError(
            f"The draft head reads the outputs of layers {', '.join(map(str, layers))}, and the model has layers 0 to "
            f"{num_layers - 1}: set eagle_aux_hidden_state_layer_ids in the head's config.json."
        )
    if len(modules) == 1 and isinstance(modules[0], DecoderStack):
        parts = modules[0].divided([layer + 1 for layer in layers])
        model.base_model.layers = torch.nn.ModuleList(parts)
        return dict(zip(layers, parts, strict=False))
    return {layer: modules[layer] for layer in layers}
