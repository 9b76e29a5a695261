"""Loading of a checkpoint with quantized weights: transformers' model with our layers where weights are quantized.

1. transformers builds the model without memory, as if the checkpoint were not quantized.
2. Each linear layer with quantized tensors in the checkpoint becomes a `QuantizedLinear`, which holds these tensors.
3. `WeightLoader` reads all tensors. No weight is converted to floats.
"""

from __future__ import annotations

import copy
import functools
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from splitserve.core.errors import ModelLoadError, SplitserveError, UnsupportedModelError, clause
from splitserve.engine.parallel.checkpoint import Checkpoint, Translation, WeightLoader, incomplete
from splitserve.engine.parallel.load import TiedWeights, empty_model
from splitserve.engine.probe import attention_checked
from splitserve.engine.quantized.gguf_blocks import unpack_blocks
from splitserve.engine.quantized.gguf_file import GgufTensors
from splitserve.engine.quantized.layers import QuantizedEmbedding, QuantizedLinear, dequantize_layers
from splitserve.engine.quantized.schemes import QuantizationScheme, rejection
from splitserve.engine.quantized.unpack import check_order, unpack_of

logger = logging.getLogger(__name__)

# A layer with one of these tensors is quantized.
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
# Tensors that are part of a weight.
_PARTS = (*_MARKS, "weight", "qzeros", "scales", "g_idx", "weight_zero_point", "weight_g_idx")
# Tensors that a layer needs, by method: one of each tuple.
_GROUPED = (("qweight",), ("qzeros",), ("scales",))
_SCALED = (("weight", "weight_packed"), ("weight_scale", "weight_scale_inv"))
_NEEDED = {"gptq": _GROUPED, "awq": _GROUPED}


def build_quantized(
    folder: Path, config: Any, scheme: QuantizationScheme, name: str, dtype_name: str
) -> tuple[Any, int]:
    """Return the model on the CPU, and the number of its parameters. `config`: of transformers.

    Raises ModelLoadError, also for an unsupported layout of tensors.
    """
    try:
        return _load(folder, config, scheme, name, getattr(torch, dtype_name))
    except SplitserveError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"Model {name} in {folder}, quantized by {scheme.name}, cannot be loaded: {type(error).__name__}: "
            f"{clause(error)}. Check that its files are complete and match its config.json."
        ) from error


def dequantize(model: Any, name: str, scheme: QuantizationScheme, dtype_name: str) -> None:
    """Convert the quantized layers of `model`, with a warning."""
    count = dequantize_layers(model, getattr(torch, dtype_name))
    logger.warning(
        "%d layers of %s, quantized by %s, are converted to %s: only our kernels keep weights quantized. They need "
        "bfloat16 on a CPU, and do not compute these layers here",
        count,
        name,
        scheme.name,
        dtype_name,
    )


def _load(folder: Path, config: Any, scheme: QuantizationScheme, name: str, dtype: torch.dtype) -> tuple[Any, int]:
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with attention_checked(name):
        model = empty_model(folder, config, dtype)
    num_parameters = sum(p.numel() for p in model.parameters())
    with closing(GgufTensors(folder, model) if scheme.method == "gguf" else Checkpoint(folder)) as tensors:
        if isinstance(tensors, GgufTensors):
            count = _keep_blocks(model, tensors, dtype)
        else:
            count = _hold_tensors(model, tensors, scheme, name)
        loader = WeightLoader(model, tensors, {}, torch.device("cpu"))
        TiedWeights.of(model).load(loader, Translation(model), model)
    logger.info("%d layers of %s are quantized by %s and stay so", count, name, scheme.name)
    return model.requires_grad_(False).eval(), num_parameters


def _hold_tensors(model: Any, checkpoint: Checkpoint, scheme: QuantizationScheme, name: str) -> int:
    """Replace the linear layers with quantized tensors.

    Raises ModelLoadError if any of these have no such layer, or if a layer lacks some.
    """
    names = set(checkpoint.names())
    layers = {n.rpartition(".")[0] for n in names if n.rpartition(".")[2] in _MARKS}
    missing: list[str] = []
    head = model.get_output_embeddings()
    for path in layers:
        try:
            old = model.get_submodule(path)
        except AttributeError:
            old = None
        if type(old) is not torch.nn.Linear:
            raise rejection(name, f"{scheme.name} in {path}, which is no linear layer of {type(model).__name__},")
        parts = {part: checkpoint.empty(f"{path}.{part}") for part in _PARTS if f"{path}.{part}" in names}
        bias = f"{path}.bias"
        needed = _NEEDED.get(scheme.method, _SCALED)
        missing += [f"{path}.{ways[0]}" for ways in needed if parts.keys().isdisjoint(ways)]
        missing += [bias] if old.bias is not None and bias not in names else []
        if missing:
            continue
        num_outputs = len(parts["scales"].T if "scales" in parts else next(parts[p] for p in _SCALED[0] if p in parts))
        # Outputs of a head beyond the vocabulary are padding, which `QuantizedLinear` drops.
        if num_outputs < old.out_features or (num_outputs > old.out_features and old is not head):
            raise UnsupportedModelError(
                f"{path} has {num_outputs} outputs in {checkpoint.place}, and the model's config makes it "
                f"{old.out_features}. Check that all files of the model belong to its config.json."
            )
        _check_index(checkpoint, path, parts, scheme, name)
        # Some writers store a bias of zeros for layers without one.
        has_bias = bias in names and (old.bias is not None or bool(checkpoint.read(bias, None).any()))
        new = QuantizedLinear(old.in_features, old.out_features, parts, unpack_of(scheme), has_bias)
        model.set_submodule(path, new)
    if missing:
        raise incomplete(missing, checkpoint.place)
    if not layers:
        raise ModelLoadError(f"Checkpoint {name} has no tensors of {scheme.name}: its config does not match its files.")
    return len(layers)


def _check_index(
    checkpoint: Checkpoint, path: str, parts: dict[str, torch.Tensor], scheme: QuantizationScheme, name: str
) -> None:
    """Raise ModelLoadError if a layer's inputs are not in the order of their groups."""
    for index, scales, dim in (("g_idx", "scales", 0), ("weight_g_idx", "weight_scale", 1)):
        if index in parts:
            try:
                check_order(checkpoint.read(f"{path}.{index}", None), parts[scales].shape[dim])
            except ValueError as error:
                raise rejection(name, f"{scheme.name} with reordered inputs ({path}: {error})") from None


def _keep_blocks(model: Any, tensors: GgufTensors, dtype: torch.dtype) -> int:
    """Replace the linear layers and the embedding that a GGUF file has in blocks; return their number."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    paths = {module: path for path, module in model.named_modules()}
    count = 0
    for module, path in paths.items():
        if f"{path}.bias" in tensors.absent_biases:
            module.bias = None
        source = paths[embedding] if module is head and is_tied else path
        kind = tensors.type_of(f"{source}.weight")
        if kind is None:
            continue
        blocks = torch.empty(tensors.shape(f"{source}.weight"), dtype=torch.uint8, device="meta")
        if type(module) is torch.nn.Linear:
            unpack = functools.partial(_unpack_weight, kind)
            has_bias = module.bias is not None
            new: Any = QuantizedLinear(module.in_features, module.out_features, {"weight": blocks}, unpack, has_bias)
        elif type(module) is torch.nn.Embedding:
            new = QuantizedEmbedding(module.num_embeddings, blocks, kind, dtype)
        else:
            continue
        model.set_submodule(path, new)
        tensors.kept.add(f"{source}.weight")
        count += 1
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return count


def _unpack_weight(kind: str, tensors: Any) -> Any:
    return unpack_blocks(tensors["weight"], kind)
