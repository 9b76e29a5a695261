"""Text parts of multimodal checkpoints, which are served as plain causal LMs.

`text_part` returns the config of the text model, and `text_names` the names of its weights. All code behind them gets
a text model. The weights of other parts are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splitserve.core.errors import UnsupportedModelError
from splitserve.engine.fit import model_config, tensor_files

logger = logging.getLogger(__name__)

# Multimodal models that compute logits of text as the class of their text model does, if it is one of _TEXT_MODELS.
# Not listed: PaliGemma attends to later tokens of a prompt, and Aya Vision does not scale its logits as Cohere 2 does.
_MODELS = frozenset({"gemma3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "vipllava"})
_TEXT_MODELS = frozenset({"gemma3_text", "llama", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_moe"})
_MEDIA = ("vision_config", "audio_config")
# Prefixes of the text model's weights in checkpoints, in both formats, and in its own class.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
# Fields of the outer config that apply to the text model.
_OUTER_FIELDS = ("dtype", "eos_token_id", "quantization_config")


def text_part(config: Any, folder: Path, name: str) -> Any:
    """Return the config of the model that is served: of the text model in `config`, or `config` itself.

    `config`: of transformers. Raises UnsupportedModelError if a listed model has a text model that is not listed.
    """
    if config.model_type not in _MODELS:
        return config
    text = config.get_text_config()
    if text.model_type not in _TEXT_MODELS:
        raise UnsupportedModelError(f"Model {name} {multimodal_reason(config.to_dict())}")
    for field in _OUTER_FIELDS:
        if getattr(config, field, None) is not None:
            setattr(text, field, getattr(config, field))
    # The defaults of the two configs differ. transformers uses the checkpoint's own head if it has one.
    has_head = any(key.startswith("lm_head.") for key in text_names(folder, tensor_files(folder)))
    text.tie_word_embeddings = not has_head and (config.tie_word_embeddings or text.tie_word_embeddings)
    kinds = config.model_type, text.model_type, media_parts(config.to_dict())
    logger.info("only the text model is loaded model=%s type=%s text_model=%s unused=%s", name, *kinds)
    return text


def check_text_part(folder: Path, name: str) -> None:
    """Raise UnsupportedModelError if config.json alone shows that a multimodal model is not served."""
    config = model_config(folder)
    if config.get("model_type") in _MODELS:
        is_rejected = _text_type(config) not in _TEXT_MODELS | {None}
    else:
        # A class for text may be served: that depends on its first step.
        classes = config.get("architectures")
        is_rejected = bool(classes) and "ForCausalLM" not in str(classes)
    if is_rejected and (reason := multimodal_reason(config)):
        raise UnsupportedModelError(f"Model {name} {reason}")


def media_parts(config: Mapping[str, Any]) -> str:
    """Return the parts of a config.json for other inputs than text. Empty: it has none."""
    return ", ".join(part for part in _MEDIA if config.get(part) is not None)


def multimodal_reason(config: Mapping[str, Any]) -> str:
    """Return why the model of a config.json is rejected, with the remedy. Empty: it is not multimodal."""
    if not (media := media_parts(config)):
        return ""
    text = _text_type(config)
    kind = f"{config.get('model_type')}{f' with the text model {text}' if text else ''}"
    return (
        f"is multimodal ({media} in its config): {kind}. The text model of {', '.join(sorted(_MODELS))} is "
        f"served if it is one of {', '.join(sorted(_TEXT_MODELS))}. Choose one of these, or a text model."
    )


def _text_type(config: Mapping[str, Any]) -> str | None:
    """Return the type of the text model. None: config.json does not name it."""
    text = config.get("text_config")
    return text.get("model_type") if isinstance(text, dict) else None


def is_multimodal(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` is of a multimodal model that is served."""
    return model_config(folder).get("model_type") in _MODELS


def text_names(folder: Path, stored: Iterable[str]) -> dict[str, str]:
    """Return the stored names of the served model's tensors, by their names in its class."""
    if not is_multimodal(folder):
        return {name: name for name in stored}
    return {
        own + name.removeprefix(prefix): name
        for name in stored
        for prefix, own in _PREFIXES.items()
        if name.startswith(prefix)
    }
