"""What a loaded model really does in its attention, found by running one tiny step through it.

Configs spell head counts, windows and attention variants in many ways; the arguments with which a layer calls its
attention are the truth. `probe` runs two tokens with a recorder in the backend's place, and so learns each layer's KV
shape and window, and refuses (ModelLoadError) every model that the engine would compute wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.engine.attention.base import AttentionParams
from splitserve.engine.head import LanguageHead
from splitserve.errors import EngineError, ModelLoadError, clause

_REMEDY = "Choose a decoder-only model with plain causal attention (Llama, Qwen, Mistral, Mixtral, Gemma, ...)."
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps in the KV pool."""

    layer: int
    num_kv_heads: int
    # Elements of one head's key, and of its value.
    k_dim: int
    v_dim: int
    # Sliding window in tokens; None: the layer sees everything.
    window: int | None
    # Keeps keys alone, of one head: the first v_dim of their elements are the values.
    is_latent: bool = False
    # Where tensor parallel ranks divide the layer's KV heads: the first of those here, and how many there are in all.
    first_kv_head: int = 0
    total_kv_heads: int | None = None


class Recorder:
    """StepAttention that writes down what it is asked, and answers zero."""

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        num_kv_heads, k_dim = key.shape[1:]
        self.layers.append(LayerShape(layer, num_kv_heads, k_dim, value.shape[2], params.window, params.is_latent))
        return query.new_zeros(len(query), query.shape[1], value.shape[2])


def probe(
    model: Any, name: str, *, layers: range | None = None, run: Callable[[Any, Recorder], None] | None = None
) -> tuple[LayerShape, ...]:
    """Shapes of all layers, in order. Raises ModelLoadError, naming `name`, where the engine cannot run the model.

    `layers`: those that are here, where that is not all; `run`: runs them.
    """
    if model.base_model is model:
        raise ModelLoadError(f"Model {name} has no language head ({type(model).__name__}). {_REMEDY}")
    recorder = Recorder()
    try:
        (run or run_whole)(model, recorder)
    except EngineError as error:
        raise ModelLoadError(f"Model {name} cannot be served: {clause(error.message)}. {_REMEDY}") from error
    except Exception as error:
        raise ModelLoadError(
            f"Model {name} ({type(model).__name__}) does not go through transformers' attention interface: "
            f"{type(error).__name__}: {clause(error)}. {_REMEDY}"
        ) from error
    shapes = tuple(sorted(recorder.layers, key=lambda shape: shape.layer))
    config = model.config.get_text_config()
    problem = _problem(config, shapes, range(config.num_hidden_layers) if layers is None else layers)
    if problem is not None:
        raise ModelLoadError(f"Model {name} cannot be served: {problem}. {_REMEDY}")
    return shapes


def run_whole(model: Any, recorder: Recorder, **given: torch.Tensor) -> None:
    """One forward of the whole model; its logits must be what our split into body and head gives.

    `given`: in place of token ids.
    """
    given = given or {"input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)}
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    bodies: list[torch.Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _module, _args, out: bodies.append(out.last_hidden_state))
    try:
        with torch.inference_mode():
            out = model(**given, position_ids=positions, use_cache=False, step_attention=recorder)
            if len(bodies) != 1:
                raise EngineError("its forward does not run its body exactly once")
            same = torch.equal(LanguageHead(model)(bodies[0][0]), out.logits[0].float())
    finally:
        hook.remove()
    if not same:
        raise EngineError("its logits are more than a function of the last hidden state")


def config_has_windows(config: Any) -> bool:
    """Whether layers of a model have sliding windows, those that other ranks have included; `config`: the text model's.

    `probe` refuses a model whose layers here are not as this says.
    """
    kinds = getattr(config, "layer_types", None)
    return _configured_window(config) is not None if kinds is None else "sliding_attention" in kinds


def _configured_window(config: Any) -> int | None:
    """Of all layers, in tokens, where the config does not name them one by one."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


def _problem(config: Any, shapes: tuple[LayerShape, ...], layers: range) -> str | None:
    """Why these layers cannot be served; None if they can."""
    if [shape.layer for shape in shapes] != list(layers):
        return f"{len(shapes)} of its {len(layers)} layers use attention that can be paged"
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        configured = _configured_window(config)
        if configured is not None and any(shape.window != configured for shape in shapes):
            return f"its config has a sliding window of {configured}, its layers have not"
        return None
    unknown = sorted(set(kinds) - _KNOWN_LAYER_TYPES)
    if unknown:
        return f"it has layers of type {', '.join(unknown)}"
    for shape, kind in zip(shapes, kinds[layers.start : layers.stop], strict=True):
        if (shape.window is not None) != (kind == "sliding_attention"):
            return f"layer {shape.layer} is of type {kind}, but its attention has window {shape.window}"
    return None
