"""Quantization schemes of checkpoints, by their config.json: the supported ones, and the rejection of all others.

Imports neither torch nor transformers: a worker checks its model before it starts anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.core.errors import UnsupportedModelError

_REMEDY = (
    "Supported are GPTQ and AWQ (gemm) with 4 bits, GPTQ with 8 bits, compressed-tensors with 4-bit, 8-bit or FP8 "
    "weights, FP8 (E4M3), and GGUF: choose such a checkpoint, or the unquantized one with --quantization int8."
)
# Names of methods as people write them.
_NAMES = {
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "mxfp4": "MXFP4",
    "modelopt": "NVIDIA ModelOpt",
    "auto-round": "AutoRound",
    "torchao": "torchao",
    "quanto": "Quanto",
    "bitnet": "BitNet",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "quark": "AMD Quark",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "fp_quant": "FP-Quant",
}
# The file of weights in a folder that was made of a GGUF file.
GGUF_FILE = "model.gguf"
# Types of tensors and architectures (llama.cpp's names) of GGUF files with weights that stay in their blocks.
_GGUF_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PACKED = ("pack-quantized",)
_INTEGERS = ("int-quantized", "naive-quantized")
_FLOATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How a checkpoint stores its quantized linear layers."""

    # gptq, awq, compressed-tensors, fp8 or gguf.
    method: str
    # Bits of a weight; 0: each tensor has its own.
    bits: int = 0
    # Activations are quantized to int8 row by row, too.
    quantizes_rows: bool = False
    # GPTQ: a stored zero point is one less than the real one.
    zeros_less_one: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} with {self.bits} bits" if self.bits else self.method


def scheme_of(config: Mapping[str, Any], model: str) -> QuantizationScheme | None:
    """Return the scheme of a config.json; None: not quantized. Raises UnsupportedModelError if it is not supported."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    method = str(found.get("quant_method") or "unknown").lower()
    readers: Mapping[str, Callable[[Mapping[str, Any]], QuantizationScheme | str]] = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "gguf": lambda _: QuantizationScheme("gguf"),
    }
    if method not in readers:
        raise rejection(model, _NAMES.get(method, method))
    scheme = readers[method](found)
    if isinstance(scheme, str):
        raise rejection(model, scheme)
    text = config.get("text_config") or config
    if any("expert" in name and value for name, value in text.items()):
        raise rejection(model, f"{scheme.name} in a mixture of experts")
    if text.get("kv_lora_rank"):
        raise rejection(model, f"{scheme.name} with latent attention")
    return scheme


def rejection(model: str, scheme: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"Checkpoint {model} is quantized by {scheme}, which is not supported. {_REMEDY}")


def _gptq(found: Mapping[str, Any]) -> QuantizationScheme | str:
    bits, form = found.get("bits"), str(found.get("checkpoint_format") or found.get("format") or "gptq")
    if found.get("is_marlin_format") or "marlin" in form:
        return "GPTQ packed for Marlin"
    if form not in ("gptq", "gptq_v2"):
        return f"GPTQ in the format {form}"
    if not isinstance(bits, int) or bits not in (4, 8):
        return f"GPTQ with {bits} bits"
    return QuantizationScheme("gptq", bits, zeros_less_one=form == "gptq")


def _awq(found: Mapping[str, Any]) -> QuantizationScheme | str:
    bits, version = found.get("bits", found.get("w_bit")), found.get("version") or found.get("format") or "gemm"
    version = str(version).lower()
    if version != "gemm":
        return f"AWQ in the layout {version}"
    return QuantizationScheme("awq", bits) if bits == 4 else f"AWQ with {bits} bits"


def _fp8(found: Mapping[str, Any]) -> QuantizationScheme | str:
    form = found.get("fmt") or "e4m3"
    return QuantizationScheme("fp8", 8) if form == "e4m3" else f"FP8 in {str(form).upper()}"


def _compressed(found: Mapping[str, Any]) -> QuantizationScheme | str:
    groups, form = list((found.get("config_groups") or {}).values()), str(found.get("format"))
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "compressed-tensors with sparse weights"
    if any((found.get("transform_config") or {}).values()):
        return "compressed-tensors with transforms (transform_config)"
    if len(groups) != 1:
        return f"compressed-tensors with {len(groups)} groups of layers"
    weights, rows = groups[0].get("weights") or {}, groups[0].get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    name = f"compressed-tensors {form} with {bits}-bit {kind} weights"
    if kind == "float":
        return QuantizationScheme("compressed-tensors", 8) if bits == 8 and form in _FLOATS else name
    if (bits, form) not in [(4, "pack-quantized"), *((8, f) for f in (*_INTEGERS, *_PACKED))]:
        return name
    if rows is not None and (rows.get("type", "int"), rows.get("num_bits")) != ("int", 8):
        return f"{name} and {rows.get('num_bits')}-bit {rows.get('type')} activations"
    is_dynamic = rows is not None and bool(rows.get("dynamic")) and weights.get("symmetric", True)
    per_channel = weights.get("strategy") in ("channel", "tensor")
    return QuantizationScheme(
        "compressed-tensors", int(bits or 0), quantizes_rows=bits == 8 and is_dynamic and per_channel
    )


def architecture_of(reader: Any) -> str:
    """Return the architecture of a GGUF file, by llama.cpp's name."""
    return str(reader.fields["general.architecture"].contents())


def why_dequantized(path: Path) -> str | None:
    """Return why the weights of a GGUF file cannot stay in their blocks; None: they can."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = architecture_of(reader)
    except Exception as error:
        return f"it cannot be read ({error})"
    matrices = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    if architecture not in _GGUF_ARCHITECTURES:
        return f"its architecture is {architecture}"
    if any("_exps" in tensor.name for tensor in reader.tensors):
        return "it is a mixture of experts"
    if not matrices <= _GGUF_TYPES:
        return f"it has tensors of type {', '.join(sorted(matrices - _GGUF_TYPES))}"
    return None if any(name.startswith("Q") for name in matrices) else "none of its weights are quantized"
