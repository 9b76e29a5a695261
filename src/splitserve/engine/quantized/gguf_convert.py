"""Conversion of a GGUF file to a folder: config and tokenizer, and weights as safetensors or as a link to the file.

transformers reads the file. It drops tensors and settings that it does not know. So a file with such a tensor is
rejected, and scaled positions are put into the config here. Imports neither torch nor transformers until it converts.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.core.errors import ModelLoadError, UnsupportedModelError, clause
from splitserve.engine.quantized.schemes import GGUF_FILE

# Divisors of the frequencies of positions, one per pair of numbers in a head (Llama 3.1 and later).
_ROPE_FACTORS = "rope_freqs.weight"
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

        config, tokenizer = _config_of(source, path, reader), AutoTokenizer.from_pretrained(**source)
        dtype, floats = getattr(torch, gguf_dtype(reader)), GgufConfig(dequantize=True)
        model, found = AutoModelForCausalLM.from_pretrained(
            **source, config=config, dtype=dtype, quantization_config=floats, output_loading_info=True
        )
        if missing := found["missing_keys"]:
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


def _config_of(source: dict[str, str], path: Path, reader: Any) -> Any:
    """Return the config of a file's model. Raises UnsupportedModelError if the model does not use all of the file."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**source)
    architecture = reader.fields["general.architecture"].contents()
    _check_tensors(path, reader, architecture, config)
    _scale_positions(path, reader, architecture, config)
    return config


def _check_tensors(path: Path, reader: Any, architecture: str, config: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    # Stacked experts have no `.weight` in these names.
    names = get_gguf_hf_weights_map(model, processor, architecture)
    taken = {_ROPE_FACTORS, *(name.removesuffix(".weight") for name in names)}
    unknown = [t.name for t in reader.tensors if taken.isdisjoint((t.name, t.name.removesuffix(".weight")))]
    if unknown:
        more = f" and {len(unknown) - _NUM_NAMED} more" if len(unknown) > _NUM_NAMED else ""
        raise UnsupportedModelError(
            f"{path} has tensors that {type(model).__name__} does not use: {', '.join(unknown[:_NUM_NAMED])}{more}. "
            "Without them its answers would be wrong. Use the model's safetensors."
        )


def _scale_positions(path: Path, reader: Any, architecture: str, config: Any) -> None:
    """Put the scaling of positions of a GGUF file into its config. Raises UnsupportedModelError if that is impossible.

    As llama.cpp does: a factor without a type is linear.
    """

    def setting(name: str) -> Any:
        field = reader.fields.get(f"{architecture}.rope.{name}")
        return None if field is None else field.contents()

    kind = setting("scaling.type") or "linear"
    scale = float(setting("scaling.factor") or setting("scale_linear") or 1.0) if kind == "linear" else 1.0
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # transformers computes these factors of Gemma 4 by itself.
    if any(isinstance(r, dict) and r.get("rope_type") == "proportional" for r in rope.values()):
        factors = None
    is_known = kind in ("none", "linear", rope.get("rope_type"))
    if is_known and factors is None and scale == 1.0:
        return
    if not is_known or rope.get("rope_type") != "default":
        what = _ROPE_FACTORS if is_known and scale == 1.0 else f"{architecture}.rope.scaling ({kind})"
        raise UnsupportedModelError(
            f"{path} scales its positions by {what}, which is not supported for {config.model_type}. Use the model's "
            "safetensors."
        )
    more: dict[str, Any] = {"rope_type": "linear", "factor": scale}
    if factors is not None:
        divisors = [float(factor) * scale for factor in factors]
        more = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        more |= {"original_max_position_embeddings": config.max_position_embeddings}
        more |= {"factor": 1.0, "attention_factor": 1.0}
    config.rope_parameters = rope | more
