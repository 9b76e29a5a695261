"""Conversion of a GGUF file to a folder: config and tokenizer, and weights as safetensors or as a link to the file.

transformers reads the file. It drops tensors and settings that it does not know. So a file with such a tensor is
rejected. Head sizes, biases and scaled positions are put into the config here. Imports neither torch nor transformers
until it converts.
"""

from __future__ import annotations

import errno
import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.core.errors import ModelLoadError, UnsupportedModelError, clause
from splitserve.engine.quantized.schemes import GGUF_FILE, architecture_of

# Divisors of the frequencies of positions, one per pair of numbers in a head (Llama 3.1 and later).
_ROPE_FACTORS = "rope_freqs.weight"
# Settings of YaRN by transformers' names: llama.cpp's converter copies them from the model's config.
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
# Settings that transformers does not have, with the values that change nothing.
_UNUSED = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
_NUM_NAMED = 3


def describe_gguf(path: Path, target: Path, progress: bool) -> None:
    """Write config and tokenizer of the GGUF's model into `target`, and a link to the file, which has the weights."""
    with _converting(path, progress) as (source, reader):
        from transformers import AutoTokenizer, GenerationConfig

        from splitserve.engine.quantized.gguf_file import write_tensor_table

        config = _config_of(source, path, reader)
        config.dtype = "bfloat16"
        GenerationConfig.from_model_config(config).save_pretrained(target)
        config.quantization_config = {"quant_method": "gguf"}
        config.save_pretrained(target)
        AutoTokenizer.from_pretrained(**source).save_pretrained(target)
        write_tensor_table(reader, target)
        (target / GGUF_FILE).symlink_to(path.resolve())


def convert_gguf(path: Path, target: Path, progress: bool) -> None:
    """Write the GGUF's model as safetensors, with tokenizer and generation config, into `target`."""
    with _converting(path, progress) as (source, reader):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        from splitserve.engine.parallel.checkpoint import incomplete
        from splitserve.engine.quantized.gguf_file import absent_biases

        config, tokenizer = _config_of(source, path, reader), AutoTokenizer.from_pretrained(**source)
        dtype, floats = getattr(torch, gguf_dtype(reader)), GgufConfig(dequantize=True)
        model, found = AutoModelForCausalLM.from_pretrained(
            **source, config=config, dtype=dtype, quantization_config=floats, output_loading_info=True
        )
        # Biases that are not in the file were filled with zeros.
        missing = found["missing_keys"]
        if missing := missing - absent_biases(architecture_of(reader), model.state_dict(), missing):
            raise incomplete(missing, path)
        model.save_pretrained(target)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _converting(path: Path, progress: bool) -> Iterator[tuple[dict[str, str], Any]]:
    """Show that a GGUF is converted. Yield the arguments that select it, and its reader. Raises ModelLoadError."""
    # Bound to the real standard error before that is replaced, which keeps progress bars of libraries off the terminal.
    console = Console(emoji=False, file=sys.stderr, quiet=not progress)
    with console.status(f"Converting {path.name} ..."), redirect_stderr(io.StringIO()):
        from gguf import GGUFReader
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        try:
            yield {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}, GGUFReader(path)
        except (OSError, ModelLoadError):
            raise
        except Exception as error:
            if f"(os error {errno.ENOSPC})" in str(error):
                # Libraries in Rust have their own errors for a full disk.
                raise OSError(clause(error)) from error
            raise ModelLoadError(
                f"{path} cannot be converted: {type(error).__name__}: {clause(error)}. "
                "Use an architecture that transformers reads from GGUF, or the model's safetensors."
            ) from error


def gguf_dtype(reader: Any) -> str:
    """Return bfloat16, or float32 for a GGUF with a matrix in float32 or float16: quantized weights have fewer bits."""
    from gguf import GGMLQuantizationType

    exact = {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    matrices = (tensor for tensor in reader.tensors if len(tensor.shape) > 1)
    return "float32" if any(tensor.tensor_type in exact for tensor in matrices) else "bfloat16"


def _setting(reader: Any, name: str) -> Any:
    """Return a setting of the file's architecture. None: the file does not have it."""
    field = reader.fields.get(f"{architecture_of(reader)}.{name}")
    return None if field is None else field.contents()


def _unsupported(path: Path, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path} {problem}. Use the model's safetensors.")


def _config_of(source: dict[str, str], path: Path, reader: Any) -> Any:
    """Return the config of a file's model. Raises UnsupportedModelError if the model does not use all of the file."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**source)
    architecture = architecture_of(reader)
    biases = [tensor.name for tensor in reader.tensors if tensor.name.endswith(".bias")]
    if architecture == "llama" and biases:
        config.attention_bias = any(".attn_" in name for name in biases)
        config.mlp_bias = any(".ffn_" in name for name in biases)
    _set_heads(path, reader, config)
    if architecture in ("gemma2", "gemma3"):
        # The file does not have this divisor. In llama.cpp it is the head size, except in the models of 27B.
        is_27b = config.num_hidden_layers in (46, 62)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    _check_tensors(path, reader, architecture, config)
    _scale_positions(path, reader, architecture, config)
    return config


def _set_heads(path: Path, reader: Any, config: Any) -> None:
    """Set the head size. Raises UnsupportedModelError if values have another, or if another part of it is rotated."""
    num_heads = getattr(config, "num_attention_heads", None)
    # transformers reads both head sizes of Gemma 4.
    if not isinstance(num_heads, int) or hasattr(config, "global_head_dim"):
        return
    old = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    size = _setting(reader, "attention.key_length") or old
    rotated = round(size * (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0))
    for name, needed in (("attention.value_length", size), ("rope.dimension_count", rotated)):
        if (found := _setting(reader, name)) not in (None, needed):
            raise _unsupported(path, f"has {name} {found}, and {config.model_type} with heads of {size} has {needed}")
    if size != old:
        config.head_dim = size


def _check_tensors(path: Path, reader: Any, architecture: str, config: Any) -> None:
    """Raise UnsupportedModelError for a tensor that the model does not have, or has in another size."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    # Stacked experts have no `.weight` in these names.
    names = {n.removesuffix(".weight"): t for n, t in get_gguf_hf_weights_map(model, processor, architecture).items()}
    targets = {t.name: names.get(t.name) or names.get(t.name.removesuffix(".weight")) for t in reader.tensors}
    unknown = [name for name, target in targets.items() if target is None and name != _ROPE_FACTORS]
    if unknown:
        more = f" and {len(unknown) - _NUM_NAMED} more" if len(unknown) > _NUM_NAMED else ""
        listed = f"{', '.join(unknown[:_NUM_NAMED])}{more}. Without them its answers would be wrong"
        raise _unsupported(path, f"has tensors that {type(model).__name__} does not use: {listed}")
    parameters, num_parts = model.state_dict(), Counter(targets.values())
    for tensor in reader.tensors:
        target = targets[tensor.name]
        needed = parameters.get(target)
        # transformers transposes some tensors, and joins some of experts.
        if needed is not None and num_parts[target] == 1 and needed.numel() != tensor.n_elements:
            shapes = f"{tensor.shape[::-1].tolist()}, and its settings make it {list(needed.shape)}"
            raise _unsupported(path, f"has {tensor.name} of shape {shapes}")


def _scale_positions(path: Path, reader: Any, architecture: str, config: Any) -> None:
    """Put the scaling of positions of a GGUF file into its config. Raises UnsupportedModelError if that is impossible.

    As llama.cpp does: a factor without a type is linear, and only full attention of Gemma 3 is scaled.
    """

    def setting(name: str) -> Any:
        return _setting(reader, f"rope.{name}")

    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # transformers computes these factors of Gemma 4 by itself.
    if any(isinstance(r, dict) and r.get("rope_type") == "proportional" for r in rope.values()):
        factors = None
    kinds = ["none", "linear", "yarn"] if factors is None else ["none", "linear"]
    if architecture == "gemma3":
        kinds = ["none", "linear"] if factors is None else []
        rope["sliding_attention"]["rope_theta"] = setting("freq_base_swa") or rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    kind, own = setting("scaling.type") or "linear", rope.get("rope_type")
    # transformers reads the settings of the model's own type.
    is_read = kind in ("none", own)
    scale = 1.0 if is_read else float(setting("scaling.factor") or setting("scale_linear") or 1.0)
    unused = [] if is_read else [n for n, neutral in _UNUSED.items() if setting(f"scaling.{n}") not in (None, neutral)]
    found = [f"{architecture}.rope.scaling.{name}" for name in unused]
    if scale != 1.0 or not (is_read or kind in kinds):
        found.append(f"{architecture}.rope.scaling ({kind})")
    if factors is not None:
        found.append(_ROPE_FACTORS)
    if found and (unused or own != "default" or kind not in kinds):
        names = " and ".join(found)
        raise _unsupported(path, f"scales its positions by {names}, which is not supported for {config.model_type}")
    if factors is not None:
        divisors = [float(factor) * scale for factor in factors]
        rope |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0}
        rope |= {"original_max_position_embeddings": config.max_position_embeddings, "attention_factor": 1.0}
    elif scale != 1.0:
        rope |= {"rope_type": kind, "factor": scale}
        if kind == "yarn":
            original = setting("scaling.original_context_length") or config.max_position_embeddings
            rope["original_max_position_embeddings"] = original
            rope |= {name: value for name, key in _YARN.items() if (value := setting(f"scaling.{key}")) is not None}
