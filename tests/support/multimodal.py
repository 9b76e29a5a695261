"""Tiny random checkpoints of multimodal models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from splitserve.engine.attention.base import ATTENTION_NAME, register_attention
from support.tiny_models import tiny_tokenizer

# Type of the whole model and of its text model.
MULTIMODAL_KINDS = [
    ("gemma3", "gemma3_text"),
    ("mistral3", "mistral"),
    ("mistral3", "ministral3"),
    ("llava", "llama"),
    ("llava_next", "mistral"),
    ("llava_onevision", "qwen2"),
    ("vipllava", "llama"),
    ("internvl", "qwen3"),
    ("internvl", "qwen3_moe"),
]
_TEXT: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SMALL_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def save_multimodal(
    kind: str, text_kind: str, folder: Path, *, tied: bool | None = None, dtype: str = "float32"
) -> Any:
    """Save a random model of this kind. `tied`: tie_word_embeddings of the outer config; None: its default."""
    experts = _EXPERTS if text_kind == "qwen3_moe" else {}
    text = transformers.AutoConfig.for_model(text_kind, **_TEXT, **experts)
    config = transformers.AutoConfig.for_model(kind)
    vision = {**SMALL_VISION, "model_type": config.vision_config.model_type}
    ties = {} if tied is None else {"tie_word_embeddings": tied}
    config = type(config)(text_config=text.to_dict(), vision_config=vision, eos_token_id=[258, 259], **ties)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tiny_tokenizer().save_pretrained(folder)


def whole_model(folder: Path) -> Any:
    """Return transformers' multimodal model in float32. Its text model computes attention as ours does."""
    register_attention()
    attention = {"text_config": ATTENTION_NAME, "": "sdpa"}
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    body = model.model.language_model
    forward = body.forward
    # LLaVA-OneVision passes an argument of its head to its body, and so to the attention.
    body.forward = lambda **given: forward(**{name: x for name, x in given.items() if name != "logits_to_keep"})
    return model.eval()


def rename_weights(folder: Path, names: dict[str, str]) -> None:
    """Rename the tensors of a checkpoint: each of `names` that a name begins with is replaced."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in names.items():
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json. None: remove the field."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
