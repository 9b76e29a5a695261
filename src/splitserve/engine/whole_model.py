"""A model on one rank: transformers' model from its checkpoint, with our kernels in its layers.

1. `load_whole` loads weights that are not quantized. On a CPU all workers of a host map one copy
   (`shared_weights.py`).
2. `load_quantized` keeps the weights of a quantized checkpoint in their own format (`quantized/load.py`).

`loader.py` chooses, and loads a rank's share if several ranks compute the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, modeling_utils
from transformers.utils import logging as transformers_logging

from splitserve.core.config import KERNELS, QUANTIZATIONS, ModelConfig
from splitserve.core.errors import ConfigError, ModelLoadError, SplitserveError, clause
from splitserve.engine.attention.base import ATTENTION_NAME, register_attention
from splitserve.engine.fingerprint import model_fingerprint
from splitserve.engine.kernels.layers import replace_layers
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.kernels.weights import Kind
from splitserve.engine.mla import use_latents
from splitserve.engine.parallel.checkpoint import Checkpoint, Translation, WeightLoader, incomplete
from splitserve.engine.parallel.load import TiedWeights, empty_model
from splitserve.engine.probe import attention_checked, probe
from splitserve.engine.quantized.layers import quantized_layers, silent_layers
from splitserve.engine.quantized.load import build_quantized, dequantize
from splitserve.engine.quantized.schemes import QuantizationScheme
from splitserve.engine.shared_weights import ModelFacts, WholeModel, is_shareable, load_shared, weights_key
from splitserve.engine.text_part import is_multimodal

logger = logging.getLogger(__name__)

# Held while transformers constructs a model, because it changes torch's default dtype for all threads meanwhile.
# Reentrant: a model may construct another one.
CONSTRUCTION = threading.RLock()
# Torch's kernel for grouped experts needs rows of a multiple of this number of bytes.
_EXPERT_ROW_BYTES = 16
# Fraction of the load timeout to wait for a worker that builds the shared weights.
_WAIT_FRACTION = 0.9


def _locked(change_dtype: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def local_torch_dtype(*args: Any, **options: Any) -> Iterator[None]:
        with CONSTRUCTION, change_dtype(*args, **options):
            yield

    return local_torch_dtype


# Steps run while transformers reads weights, which takes long. In its versions 5.17 to 5.23 this context surrounds each
# constructor, in `from_pretrained` and in `from_config`, and nothing else changes the dtype.
modeling_utils.local_torch_dtype = _locked(modeling_utils.local_torch_dtype)


def find_kernels(
    config: ModelConfig, device: torch.device, dtype_name: str, *, is_quantized: bool
) -> KernelLibrary | None:
    """Return the kernels in C if they can be used. Raises ConfigError if an option needs a missing kernel."""
    if config.kernels not in KERNELS:
        raise ConfigError(f"kernels is {config.kernels!r}: use {' or '.join(KERNELS)}.")
    if config.quantization not in (None, *QUANTIZATIONS):
        raise ConfigError(f"quantization is {config.quantization!r}: use {' or '.join(QUANTIZATIONS)}.")
    dtypes = ("bfloat16", "float16") if config.quantization is None and not is_quantized else ("bfloat16",)
    library = None
    if config.kernels == "auto" and device.type == "cpu" and dtype_name in dtypes:
        library = find_library(getattr(torch, dtype_name), for_all_rows=config.deterministic)
    if library is None and config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization} needs our kernels, which compute bfloat16 on CPUs: use --device cpu "
            f"with --dtype bfloat16 or auto (here: {dtype_name} on {device}), without --kernels torch. If they were "
            "not built, install splitserve again with a C compiler present."
        )
    if config.quantization == "w8a8" and library is not None and library.multiplies_pairs:
        logger.warning("w8a8 is for CPUs without bfloat16 instructions: on this CPU int8 is more accurate")
    return library


def load_whole(
    folder: Path,
    checkpoint: Any,
    config: ModelConfig,
    dtype_name: str,
    device: torch.device,
    kernels: KernelLibrary | None,
) -> WholeModel:
    """Return the model of one rank, with the kernels in its layers. On a CPU its weights are mapped from a file."""
    kind = Kind[(config.quantization or "bf16").upper()]

    def load() -> WholeModel:
        model = _build(folder, config.model, dtype_name, device, checkpoint)
        adapt(model, config.model)
        layers = probe(model, config.model)
        num_parameters = sum(p.numel() for p in model.parameters())
        replaced = () if kernels is None else replace_layers(model, layers, kernels, kind)
        return WholeModel(model, ModelFacts(layers=layers, num_parameters=num_parameters, replaced=replaced))

    def outline(facts: ModelFacts) -> Any:
        with torch.device("meta"):
            model = _without_weights(folder, checkpoint, dtype_name)
            adapt(model, config.model)
            if kernels is not None:
                replace_layers(model, facts.layers, kernels, kind, facts.replaced)
        return model

    if not (config.share_weights and is_shareable(checkpoint, device, kernels)):
        return load()

    def read_key() -> str:
        return weights_key(model_fingerprint(folder), dtype_name, config.quantization, kernels)

    return load_shared(read_key, config.load_timeout * _WAIT_FRACTION, load, outline)


def load_quantized(
    folder: Path,
    checkpoint: Any,
    config: ModelConfig,
    scheme: QuantizationScheme,
    dtype_name: str,
    device: torch.device,
    kernels: KernelLibrary | None,
) -> WholeModel:
    """Return the model of a quantized checkpoint. Layers that our kernels do not compute are dequantized."""
    model, num_parameters = build_quantized(folder, checkpoint, scheme, config.model, dtype_name)
    if kernels is None:
        dequantize(model, config.model, scheme, dtype_name)
    model = model.to(device)
    adapt(model, config.model)
    with silent_layers(model):
        layers = probe(model, config.model)
    replaced: tuple[str, ...] = ()
    if kernels is not None:
        replaced = replace_layers(model, layers, kernels, Kind[(config.quantization or "bf16").upper()])
        if quantized_layers(model):
            dequantize(model, config.model, scheme, dtype_name)
    return WholeModel(model, ModelFacts(layers=layers, num_parameters=num_parameters, replaced=replaced))


def _build(folder: Path, name: str, dtype_name: str, device: torch.device, checkpoint: Any) -> Any:
    register_attention()
    transformers_logging.disable_progress_bar()
    try:
        if is_multimodal(folder):
            return _build_text_part(folder, checkpoint, getattr(torch, dtype_name), device)
        with attention_checked(name):
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype_name),
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        # transformers fills them with random numbers. Weights that follow from others are not among them.
        if missing := found["missing_keys"]:
            raise incomplete(missing, folder)
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"Model {name} does not fit on {device} in {dtype_name}. Use a smaller dtype or model, or another device."
        ) from error
    except SplitserveError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"Model {name} in {folder} cannot be loaded: {type(error).__name__}: {clause(error)}. It must be a "
            "decoder-only model with safetensors weights and a model class in transformers that supports its attention "
            "interface."
        ) from error


def _build_text_part(folder: Path, checkpoint: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the text model of a multimodal checkpoint. transformers would log each weight of the other parts."""
    model = empty_model(folder, checkpoint, dtype)
    with closing(Checkpoint(folder)) as tensors:
        TiedWeights.of(model).load(WeightLoader(model, tensors, {}, device), Translation(model), model)
    return model.to(device).requires_grad_(False).eval()


def _without_weights(folder: Path, checkpoint: Any, dtype_name: str) -> Any:
    """Return the model as `_build` does, but on torch's current default device and without the checkpoint's weights."""
    register_attention()
    dtype = getattr(torch, dtype_name)
    model = AutoModelForCausalLM.from_config(checkpoint, dtype=dtype, attn_implementation=ATTENTION_NAME)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def adapt(model: Any, name: str) -> None:
    """Adapt a model of transformers after its weights, or this rank's part of them, were loaded."""
    use_latents(model, name)
    _choose_experts(model, name)


def _choose_experts(model: Any, name: str) -> None:
    """Compute the experts of `model` one after the other if transformers' default cannot.

    The default (`grouped_mm`) sorts tokens by expert and multiplies all in one call. It reads no number back from the
    device, so decode steps can be recorded as CUDA graphs.
    """
    # Bytes of a row of each weight of the experts.
    sizes = {
        weight.shape[-1] * weight.element_size()
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel")
        for weight in module.parameters(recurse=False)
        if weight.ndim == 3
    }
    rows = {size for size in sizes if size % _EXPERT_ROW_BYTES}
    if rows and model.config.get_text_config()._experts_implementation == "grouped_mm":
        logger.warning(
            "the experts of %s are computed one after the other: rows of %s bytes are not multiples of %d",
            name,
            ", ".join(map(str, sorted(rows))),
            _EXPERT_ROW_BYTES,
        )
        model.set_experts_implementation("eager")
