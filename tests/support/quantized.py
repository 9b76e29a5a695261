"""Tiny checkpoints in the layouts of quantized models, written from random codes, and the weights that they stand for.

Each writer packs by the public layout of its format, code by code, and shares nothing with the reader in `src`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from support.tiny_models import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Tensors of a layer by the last part of their names, and the weight in float32.
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TinyScheme:
    """How to write one layer of a shape, and the quantization_config of the checkpoint."""

    write: Callable[[int, int, torch.Generator], Stored]
    config: dict[str, Any]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the last dimension into int32, the first code in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        words |= codes[..., i::per_word].long() << (bits * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _codes(shape: tuple[int, ...], bits: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=random)


def _scales(shape: tuple[int, ...], bits: int, random: torch.Generator) -> torch.Tensor:
    return ((torch.rand(shape, generator=random) + 0.5) * 0.3 / (1 << bits)).half()


def _by_groups(codes: torch.Tensor, zeros: Any, scales: torch.Tensor) -> torch.Tensor:
    """(codes - zeros) x scales; codes [outputs, inputs], the others [outputs, groups]."""
    group = codes.shape[1] // scales.shape[1]
    zeros = zeros.repeat_interleave(group, 1) if isinstance(zeros, torch.Tensor) else zeros
    numbers: torch.Tensor = (codes - zeros).float()
    return numbers * scales.float().repeat_interleave(group, 1)


def gptq(bits: int, group: int, *, symmetric: bool, version: int = 1, reordered: bool = False) -> TinyScheme:
    def write(outputs: int, inputs: int, random: torch.Generator) -> Stored:
        codes, scales = _codes((outputs, inputs), bits, random), _scales((outputs, inputs // group), bits, random)
        zeros = torch.randint(1, 1 << bits, scales.shape, generator=random)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        index = torch.arange(inputs) // group
        tensors = {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed((zeros - (2 - version)).T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (index.flip(0) if reordered else index).to(torch.int32),
            # Some writers store it for every layer.
            "bias": torch.zeros(outputs, dtype=torch.float16),
        }
        return tensors, _by_groups(codes, zeros, scales)

    form = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": form}
    return TinyScheme(write, config | {"desc_act": reordered})


def awq(group: int) -> TinyScheme:
    def write(outputs: int, inputs: int, random: torch.Generator) -> Stored:
        codes, scales = _codes((outputs, inputs), 4, random), _scales((outputs, inputs // group), 4, random)
        zeros = _codes((outputs, inputs // group), 4, random)
        order = torch.arange(outputs).view(-1, 8)[:, list(_AWQ_ORDER)].flatten()
        tensors = {
            "qweight": packed(codes.T[:, order], 4),
            "qzeros": packed(zeros.T[:, order], 4),
            "scales": scales.T.contiguous(),
        }
        return tensors, _by_groups(codes, zeros, scales)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return TinyScheme(write, config)


def _compressed_config(form: str, weights: dict[str, Any], rows: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compressed_int8(*, dynamic_rows: bool) -> TinyScheme:
    """int8 with a scale per output; with dynamic_rows, activations per token, too."""

    def write(outputs: int, inputs: int, random: torch.Generator) -> Stored:
        codes, scales = _codes((outputs, inputs), 8, random) - 128, _scales((outputs, 1), 8, random).bfloat16()
        return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes.float() * scales.float()

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    rows = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    return TinyScheme(write, _compressed_config("int-quantized", weights, rows if dynamic_rows else None))


def compressed_packed(bits: int, group: int, *, symmetric: bool) -> TinyScheme:
    def write(outputs: int, inputs: int, random: torch.Generator) -> Stored:
        codes = _codes((outputs, inputs), bits, random)
        scales = _scales((outputs, inputs // group), bits, random).bfloat16()
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if symmetric:
            return tensors, _by_groups(codes, 1 << (bits - 1), scales)
        zeros = _codes((outputs, inputs // group), bits, random)
        tensors["weight_zero_point"] = packed(zeros.T.contiguous(), bits).T.contiguous()
        return tensors, _by_groups(codes, zeros, scales)

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    return TinyScheme(write, _compressed_config("pack-quantized", weights, None))


def _fp8(outputs: int, inputs: int, random: torch.Generator) -> torch.Tensor:
    # Small numbers, too, which E4M3 stores without a leading one.
    spread = torch.randn(outputs, inputs, generator=random) * 2.0 ** torch.randint(
        -8, 5, (outputs, inputs), generator=random
    )
    return spread.to(torch.float8_e4m3fn)


def fp8_blocks() -> TinyScheme:
    """Blocks of 128 outputs and 128 inputs, as DeepSeek-V3 has them."""

    def write(outputs: int, inputs: int, random: torch.Generator) -> Stored:
        weight = _fp8(outputs, inputs, random)
        scales = torch.rand(-(-outputs // 128), -(-inputs // 128), generator=random) * 0.01 + 0.001
        each = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        return {"weight": weight, "weight_scale_inv": scales}, weight.float() * each

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return TinyScheme(write, config)


def compressed_fp8(strategy: str) -> TinyScheme:
    """One scale per tensor or per channel."""

    def write(outputs: int, inputs: int, random: torch.Generator) -> Stored:
        weight = _fp8(outputs, inputs, random)
        shape = (outputs, 1) if strategy == "channel" else ()
        scales = (torch.rand(shape, generator=random) * 0.01 + 0.001).bfloat16()
        tensors = {"weight": weight, "weight_scale": scales, "input_scale": torch.tensor(0.02)}
        return tensors, weight.float() * scales.float()

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return TinyScheme(write, _compressed_config("float-quantized", weights, rows))


SCHEMES: dict[str, TinyScheme] = {
    "gptq 4 bits, groups of 128, symmetric": gptq(4, 128, symmetric=True),
    "gptq 4 bits, groups of 32": gptq(4, 32, symmetric=False),
    "gptq v2 4 bits, groups of 64": gptq(4, 64, symmetric=False, version=2),
    "gptq 8 bits": gptq(8, 128, symmetric=True),
    "awq, groups of 64": awq(64),
    "awq, groups of 128": awq(128),
    "compressed int8": compressed_int8(dynamic_rows=False),
    "compressed int8 with int8 activations": compressed_int8(dynamic_rows=True),
    "compressed 4 bits": compressed_packed(4, 128, symmetric=True),
    "compressed 4 bits, zero points": compressed_packed(4, 32, symmetric=False),
    "compressed 8 bits packed": compressed_packed(8, 256, symmetric=True),
    "fp8 in blocks": fp8_blocks(),
    "compressed fp8 per tensor": compressed_fp8("tensor"),
    "compressed fp8 per channel": compressed_fp8("channel"),
}


def reference_model(seed: int = 0, config: Any = None) -> Any:
    """A random float32 model of transformers, with random biases. `config`: None is a llama."""
    config = config or transformers.LlamaConfig(**SHAPE, initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def make_quantized(scheme: TinyScheme, folder: Path) -> Any:
    """Write a checkpoint into `folder`, and return a float32 model with the weights that it stands for."""
    model = reference_model()
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or path == "lm_head":
            continue
        stored, weight = scheme.write(module.out_features, module.in_features, random)
        tensors |= {f"{path}.{name}": tensor for name, tensor in stored.items()}
        module.weight.data = weight
    plain = {name: t for name, t in model.state_dict().items() if "proj" not in name}
    save_file({**tensors, **{name: t.half() for name, t in plain.items()}}, folder / "model.safetensors")
    # What the file has is the reference, also of the tensors in float16.
    for name, tensor in plain.items():
        tensor.copy_(tensor.half())
        assert model.state_dict()[name] is not None
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": scheme.config, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)
    return model


def _gguf_blocks(outputs: int, inputs: int, kind: gguf.GGMLQuantizationType, random: np.random.Generator) -> Any:
    """Random blocks with small scales; numbers for F32."""
    if kind.name == "F32":
        return random.standard_normal((outputs, inputs), dtype=np.float32) * 0.1
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (outputs * inputs // block, size), dtype=np.uint8)
    scale = (random.random((len(blocks), 1)) + 0.5).astype(np.float16)
    if kind.name == "Q6_K":
        blocks[:, 208:210] = (scale * np.float16(2e-5)).view(np.uint8)
    else:
        factor = 2e-4 if kind.name in ("Q4_K", "Q5_K") else 0.3 / (256 if kind.name == "Q8_0" else 16)
        blocks[:, 0:2] = (scale * np.float16(factor)).view(np.uint8)
    if kind.name in ("Q4_1", "Q5_1"):
        blocks[:, 2:4] = (scale * np.float16(-0.14)).view(np.uint8)
    if kind.name in ("Q4_K", "Q5_K"):
        blocks[:, 2:4] = (scale * np.float16(1e-3)).view(np.uint8)
    return blocks.reshape(outputs, -1)


def make_gguf(
    kinds: list[str],
    path: Path,
    *,
    model: Any = None,
    tied: bool = False,
    absent: str = "",
    add: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> Any:
    """Write a GGUF with matrices of these types in turn, and return the float32 model that it stands for.

    `model`: of transformers, its matrices are replaced. None: a llama. `absent`: last part of the names of the
    model's tensors that the file does not have; biases are then 0. `add`: adds or replaces values, adds tensors.
    """
    model = model or reference_model()
    config, random = model.config, np.random.default_rng(1)
    architecture = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    add(writer)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    matrices = 0
    for name, tensor in model.state_dict().items():
        base, _, last = name.rpartition(".")
        stored = f"{table.get_name(base)}.{last}"
        if absent and name.endswith(absent):
            tensor.mul_(last != "bias")
            continue
        if tied and name == "lm_head.weight":
            continue
        if tensor.ndim == 1:
            # llama.cpp adds the one to the norms of Gemma.
            weight = tensor + float(architecture.startswith("gemma"))
            writer.add_tensor(stored, weight.numpy())
            weight = tensor.clone()
        else:
            blocks_type = gguf.GGMLQuantizationType[kinds[matrices % len(kinds)]]
            matrices += 1
            blocks = _gguf_blocks(tensor.shape[0], tensor.shape[1], blocks_type, random)
            writer.add_tensor(stored, blocks, raw_dtype=blocks_type)
            weight = torch.from_numpy(gguf.dequantize(blocks, blocks_type))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and architecture == "llama":
            # llama.cpp alternates the rows of both halves of a head.
            weight = weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        tensor.copy_(weight)
    if tied:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return model


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    tokens = tiny_tokenizer().convert_ids_to_tokens(range(config.vocab_size))
    # A BPE tokenizer needs a merge.
    tokens[255] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (config.vocab_size - 256))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
