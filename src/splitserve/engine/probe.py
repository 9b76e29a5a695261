"""The body and the head of a loaded model, and its attention, found by running one tiny step through it.

A causal LM of transformers is a body (`model.base_model`) and a forward that projects the body's output to logits and
scales or caps them as that model does. `LanguageHead` runs that same forward with the body replaced by one that returns
its argument. So no model's scaling is written a second time here, and logits are computed only for requested rows.

Configs spell head counts, windows and attention variants in many ways; the arguments with which a layer calls its
attention are reliable. `probe` runs two tokens with a recorder as the backend. So it finds each layer's KV shape and
window, and rejects (ModelLoadError) every model that the engine would compute wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from splitserve.core.errors import EngineError, ModelLoadError, UnsupportedModelError, clause
from splitserve.engine.attention.base import ATTENTION_NAME, AttentionParams, StepAttention
from splitserve.engine.text_part import media_parts


class _GivenHiddenStates(torch.nn.Module):
    """Replacement of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the given states in the output class with the most fields: a model's forward copies them from it."""
        out = MoeModelOutputWithPast(last_hidden_state=self.hidden)
        out.cross_attentions = None
        return out


class LanguageHead:
    """The head of a model. Shares its weights; the model itself is unchanged. Not for two threads at a time."""

    def __init__(self, model: Any) -> None:
        self._body = _GivenHiddenStates()
        self._forward = copy.copy(model)
        self._forward._modules = dict(model._modules)
        setattr(self._forward, model.base_model_prefix, self._body)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [n, hidden_size], as float32 [n, vocab_size]."""
        self._body.hidden = hidden.unsqueeze(0)
        try:
            logits: torch.Tensor = self._forward(input_ids=None, use_cache=False).logits
        finally:
            self._body.hidden = None
        return logits[0].float()


def run_body(model: Any, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
    """Return the hidden states [T, hidden_size] behind the model's last layer. Stores the tokens' KV.

    Arguments: token ids and positions [1, T] of a step.
    """
    out = model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False, step_attention=attention)
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    """Return whether angles depend on the longest sequence of a batch once it outgrows the original context.

    `rope`: rope_parameters of a config.
    """
    kind = rope.get("rope_type")
    # PhiMoE has scales, too.
    pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
    return kind == "dynamic" or (kind == "longrope" and any(rope.get(a) != rope.get(b) for a, b in pairs))


_REMEDY = (
    "Choose a decoder-only text model with plain causal attention (Llama 2 and 3, Qwen2, Qwen3, Mistral, Mixtral, "
    "Gemma 2, ...)."
)
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's KV in the pool."""

    layer: int
    num_kv_heads: int
    # Elements of one head's key and value.
    k_dim: int
    v_dim: int
    # Sliding window in tokens; None: the layer attends to all tokens.
    window: int | None
    # Only keys are stored, of one head: their first v_dim elements are the values.
    is_latent: bool = False
    # If tensor parallel ranks divide the layer's KV heads: the first head on this rank, and the number of all heads.
    first_kv_head: int = 0
    total_kv_heads: int | None = None


class Recorder:
    """StepAttention that records its calls and returns zeros."""

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        num_kv_heads, k_dim = key.shape[1:]
        self.layers.append(LayerShape(layer, num_kv_heads, k_dim, value.shape[2], params.window, params.is_latent))
        return query.new_zeros(len(query), query.shape[1], value.shape[2])


class OwnValues:
    """StepAttention without a pool, for comparisons: an output depends on each input of its own token, and no other."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        return query * params.scaling + (key + value).repeat_interleave(group, dim=1)


@contextmanager
def attention_checked(name: str) -> Iterator[None]:
    """Raise UnsupportedModelError if the class of model `name`, constructed in the block, does not take our attention.

    Old classes have a dict of attention names, which lacks ours.
    """
    try:
        yield
    except KeyError as error:
        if ATTENTION_NAME not in error.args:
            raise
        raise rejection(name, "its class has attention of its own") from error


def probe(
    model: Any, name: str, *, layers: range | None = None, run: Callable[[Any, Recorder], None] | None = None
) -> tuple[LayerShape, ...]:
    """Return the shapes of all layers, in order. Raises ModelLoadError if the engine cannot run model `name`.

    `layers`: the layers on this rank, if these are not all; `run`: runs them.
    """
    check_class(model, name)
    config, recorder = model.config.get_text_config(), Recorder()
    try:
        (run or run_whole)(model, recorder)
    except ModelLoadError as error:
        raise UnsupportedModelError(f"Model {name} cannot be served: {clause(error.message)}.") from error
    except Exception as error:
        raise rejection(name, _failure(model, error)) from error
    reason = _problem(config, recorder.layers, range(config.num_hidden_layers) if layers is None else layers)
    if reason is not None:
        raise rejection(name, reason)
    return tuple(sorted(recorder.layers, key=lambda shape: shape.layer))


def rejection(name: str, reason: str) -> UnsupportedModelError:
    """Return the error of a model that cannot be served, with the remedy."""
    return UnsupportedModelError(f"Model {name} cannot be served: {reason}. {_REMEDY}")


def check_class(model: Any, name: str) -> None:
    """Reject a model by its config and class, without a step. Raises UnsupportedModelError."""
    kind, config = type(model).__name__, model.config.get_text_config()
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES):
        supported = " and ".join(sorted(_KNOWN_LAYER_TYPES))
        raise rejection(name, f"it has layers of type {', '.join(unknown)}, and only {supported} are supported")
    if model.base_model is model:
        raise rejection(name, f"{kind} has no body apart from its language head")
    # RoBERTa and its relatives: the first token has position padding_idx + 1, while steps count from 0.
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise rejection(name, f"the positions of {kind} start behind its padding token")


def _failure(model: Any, error: Exception) -> str:
    """Return why a model cannot be served, from the error of its step."""
    kind = type(model).__name__
    if not isinstance(error, EngineError):
        return f"a step of {kind} with our attention fails ({type(error).__name__}: {clause(error)})"
    media = media_parts(model.config.to_dict())
    return f"{kind} is multimodal ({media} in its config)" if media else clause(error.message)


def run_whole(model: Any, recorder: Recorder, **given: torch.Tensor) -> None:
    """Run one forward of the whole model; its logits must equal those of the split into body and head.

    `given`: input instead of token ids.
    """
    given = given or {"input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)}
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    bodies: list[torch.Tensor] = []
    kind, same = type(model).__name__, False
    hook = model.base_model.register_forward_hook(lambda _module, _args, out: bodies.append(out.last_hidden_state))
    try:
        with torch.inference_mode():
            out = model(**given, position_ids=positions, use_cache=False, step_attention=recorder)
            if not recorder.layers:
                raise EngineError("none of its layers computes attention by transformers' interface")
            if len(bodies) != 1:
                raise EngineError(f"a step of {kind} does not run {type(model.base_model).__name__} exactly once")
            check_numbers(out.logits)
            with suppress(AttributeError, TypeError):
                same = torch.equal(LanguageHead(model)(bodies[0][0]), out.logits[0].float())
    finally:
        hook.remove()
    if not same:
        raise EngineError(f"{kind} computes logits from more than the last hidden state")


def check_numbers(outputs: torch.Tensor) -> None:
    """Raise ModelLoadError if outputs of a probe have NaN, which equals nothing."""
    if outputs.isnan().any():
        raise ModelLoadError(
            "its weights give NaN: the checkpoint is damaged or diverged. Copy it again, or choose another one"
        )


def config_has_windows(config: Any) -> bool:
    """Return whether any layer of a model has a sliding window, on any rank. `config`: the text model's.

    `probe` rejects a model if its layers here do not agree with the result.
    """
    kinds = getattr(config, "layer_types", None)
    return _configured_window(config) is not None if kinds is None else "sliding_attention" in kinds


def _configured_window(config: Any) -> int | None:
    """Return the window of all layers, in tokens, if the config does not list their types."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


def _problem(config: Any, shapes: Sequence[LayerShape], layers: range) -> str | None:
    """Return why these layers cannot be served; None if they can."""
    kinds = getattr(config, "layer_types", None)
    found = [shape.layer for shape in shapes]
    # Zamba's shared attention modules have no layer number.
    if set(found) - set(layers):
        return "some of its attention modules belong to several layers or to none"
    if len(found) > len(set(found)):
        return f"its {len(layers)} layers compute attention {len(found)} times per step"
    if len(found) < len(layers):
        return f"only {len(found)} of its {len(layers)} layers compute attention by transformers' interface"
    shapes = sorted(shapes, key=lambda shape: shape.layer)
    if kinds is None:
        configured = _configured_window(config)
        if configured is not None and any(shape.window != configured for shape in shapes):
            return f"its config has a sliding window of {configured}, its layers have not"
        return None
    for shape, kind in zip(shapes, kinds[layers.start : layers.stop], strict=True):
        if (shape.window is not None) != (kind == "sliding_attention"):
            return f"layer {shape.layer} is of type {kind}, but its attention has window {shape.window}"
    return None
