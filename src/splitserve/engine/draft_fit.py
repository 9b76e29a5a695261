"""Check by files whether a draft model or head fits the served model, before any rank imports torch.

Ranks repeat these checks on load, and add those that need the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitserve.core.errors import ConfigError, UnsupportedModelError
from splitserve.core.speculative import SpeculativeAlgorithm, SpeculativeConfig
from splitserve.engine.fit import model_config, tensor_files, text_config
from splitserve.engine.sources import resolve_model

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Fields in the configs of EAGLE-3 variants that are not supported.
_UNKNOWN_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output", "quantization_config")
MTP_REMEDY = "Choose another --speculative-algorithm, such as ngram."
# Tensors of an MTP layer beside its decoder layer, by their names in the formats of DeepSeek-V3 and of Qwen.
MTP_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}
QWEN_PREFIX = "mtp."


def check_draft(settings: SpeculativeConfig, folder: Path, name: str) -> None:
    """Raise ConfigError or ModelLoadError if the proposer does not fit the served model in `folder`."""
    served, draft_name = {**model_config(folder), **text_config(folder)}, settings.draft_model
    if settings.algorithm is SpeculativeAlgorithm.MTP:
        mtp_prefix(folder, served, name)
    if draft_name is None:
        return
    draft = resolve_model(draft_name)
    if settings.algorithm is SpeculativeAlgorithm.EAGLE3:
        check_eagle3(draft, draft_name, text_config(draft), served)
    else:
        check_vocabulary(draft_name, text_config(draft).get("vocab_size"), name, served.get("vocab_size"))


def check_vocabulary(draft: str, found: int | None, name: str, needed: int | None) -> None:
    """Raise ConfigError if draft and served model have vocabularies of different sizes. None: unknown, not checked."""
    if None not in (found, needed) and found != needed:
        raise ConfigError(
            f"Draft model {draft} has a vocabulary of {found} tokens, model {name} one of {needed}: take a smaller "
            "model of the same family."
        )


def check_eagle3(folder: Path, name: str, config: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError or ConfigError if the head in `folder` cannot propose for the served model.

    `config`, `served`: configs of head and served model. Fields that are missing in one of them are not checked.
    """
    found = (config.get("architectures") or ["none"])[0]
    if found not in EAGLE3_ARCHITECTURES:
        raise UnsupportedModelError(
            f"Draft head {name} has the architecture {found}: --speculative-algorithm eagle3 needs one of "
            f"{', '.join(EAGLE3_ARCHITECTURES)}. A whole model is for --speculative-algorithm draft."
        )
    unknown, layers = [field for field in _UNKNOWN_VARIANTS if config.get(field)], config.get("num_hidden_layers", 1)
    if unknown or layers != 1:
        what = f"{unknown[0]} set" if unknown else f"{layers} layers"
        raise UnsupportedModelError(f"Draft head {name} has {what}, which is not supported: give another head.")
    sizes = [("vocab_size", "vocab_size", "vocab_size"), ("target_hidden_size", "target_hidden_size", "hidden_size")]
    if not {"embed_tokens.weight", "model.embed_tokens.weight"} & tensor_files(folder).keys():
        sizes.append(("hidden_size without embed_tokens", "hidden_size", "hidden_size"))
    for what, ours, theirs in sizes:
        if None not in (config.get(ours), served.get(theirs)) and config[ours] != served[theirs]:
            raise ConfigError(
                f"Draft head {name} has a {what} of {config[ours]}, and the served model one of {served[theirs]}: "
                "give the head that was trained for this model."
            )


def mtp_prefix(folder: Path, config: Mapping[str, Any], name: str) -> str:
    """Return the prefix of the tensors of the first MTP layer. Raises UnsupportedModelError if there is none.

    `folder`, `config`: of the served model.
    """
    if config.get("quantization_config"):
        raise UnsupportedModelError(f"MTP layers of quantized checkpoints ({name}) are not supported. {MTP_REMEDY}")
    found = tensor_files(folder)
    if any(key.startswith(QWEN_PREFIX) for key in found):
        prefix, names = QWEN_PREFIX, list(MTP_NAMES.values())
    elif config.get("num_nextn_predict_layers"):
        prefix, names = f"model.layers.{config.get('num_hidden_layers')}.", list(MTP_NAMES)
    else:
        raise UnsupportedModelError(
            f"Model {name} has no layer for multi-token prediction: no tensor of its checkpoint begins with "
            f"{QWEN_PREFIX}, and num_nextn_predict_layers is not in its config. {MTP_REMEDY}"
        )
    if missing := [key for key in names if f"{prefix}{key}" not in found]:
        raise UnsupportedModelError(
            f"Model {name} has no {prefix}{missing[0]}: MTP layers are read in the formats of DeepSeek-V3 and Qwen. "
            f"{MTP_REMEDY}"
        )
    return prefix
