"""Tiny random models with the features of real ones, complete enough to serve: weights, tokenizer, chat template.

Weights are sampled with a larger variance than training gives. So the best token leads by far more than float noise,
and greedy output can be compared exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TinyKind = Literal[
    "llama", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3"
]
TINY_KINDS: tuple[TinyKind, ...] = get_args(TinyKind)
# Sizes of models that tests build from a config of transformers.
SMALL_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
# Kinds with multi-head latent attention.
MLA_KINDS: tuple[TinyKind, ...] = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")
_PAD_ID, _BOS_ID, _EOS_ID = 256, 257, 258
_VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)
_CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}"
    "<{{ 'assistant' if message.role == 'assistant' else 'user' }}>{{ message.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "pad_token_id": _PAD_ID,
    "bos_token_id": _BOS_ID,
    "eos_token_id": _EOS_ID,
    "tie_word_embeddings": False,
}
# Gemma-3: full attention only in the third of four layers, and a window that is shorter than the tests' prompts.
_GEMMA_LAYERS = ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention")
_GEMMA_WINDOW = 32
# One dense layer, then mixtures of eight experts in four groups, plus a shared expert for all tokens.
_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": _COMMON["num_attention_heads"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
# RoPE with stretched positions and attention scores scaled to match.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def make_tiny_model(kind: TinyKind, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Create `folder`, save a random model of this kind into it, and return it.

    In bfloat16 it is served with our kernels. The same seed gives the same weights.
    llama: grouped-query attention. qwen2: the same with biases. qwen3: norms on queries and keys. gemma3: sliding
    windows on most layers. mixtral: two of four experts per token. qwen3_moe: the same with norms. deepseek_v2,
    deepseek_v3: latent attention, experts chosen by groups. deepseek_v2_lite: queries without compression, experts
    chosen from all.
    """
    config = _config(kind)
    # Initialisation uses torch's global generator: seed it here, and restore its state afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw_biases(model)
    model = model.to(dtype)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=_BOS_ID, eos_token_id=_EOS_ID, pad_token_id=_PAD_ID
    )
    model.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _draw_biases(model: Any) -> None:
    """Sample the biases that initialisation leaves at zero: Qwen2's, and those of DeepSeek-V3's expert choice."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)


def _config(kind: TinyKind) -> Any:
    if kind == "llama":
        return transformers.LlamaConfig(**_COMMON)
    if kind == "qwen2":
        return transformers.Qwen2Config(**{name: value for name, value in _COMMON.items() if name != "head_dim"})
    if kind == "qwen3":
        return transformers.Qwen3Config(**_COMMON)
    if kind == "mixtral":
        return transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**_COMMON, **experts)
    if kind.startswith("deepseek"):
        return _deepseek(kind)
    own = {"num_hidden_layers": len(_GEMMA_LAYERS), "layer_types": list(_GEMMA_LAYERS), "query_pre_attn_scalar": 16}
    return transformers.Gemma3TextConfig(**{**_COMMON, **own, "sliding_window": _GEMMA_WINDOW})


def _deepseek(kind: TinyKind) -> Any:
    common = {name: value for name, value in _COMMON.items() if name != "head_dim"} | _DEEPSEEK
    if kind == "deepseek_v3":
        return transformers.DeepseekV3Config(**common, q_lora_rank=24, num_nextn_predict_layers=0)
    if kind == "deepseek_v2":
        return transformers.DeepseekV2Config(
            **common, q_lora_rank=24, topk_method="group_limited_greedy", rope_parameters=_YARN
        )
    return transformers.DeepseekV2Config(**common, q_lora_rank=None, topk_method="greedy")


def tiny_tokenizer() -> Any:
    """Return a tokenizer of one token per byte, and special tokens after them. Encoding and decoding lose nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=_COMMON["max_position_embeddings"],
    )
