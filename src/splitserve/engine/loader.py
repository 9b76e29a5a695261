"""Loading a model: from a config to weights on a device, with Splitserve's attention in every layer.

1. `sources.resolve_model` resolves the name to a local folder.
2. The model class of transformers is filled from safetensors, in eval mode, on the device, in the requested dtype.
3. `probe` proves that it can be served and returns its KV shapes.

A LoadedModel is never changed afterwards. Pools, requests and steps are not known here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from splitserve.core.config import DTYPES, ModelConfig
from splitserve.core.errors import (
    ConfigError,
    ModelLoadError,
    OptionError,
    RanksLostError,
    SplitserveError,
    UnsupportedModelError,
    clause,
)
from splitserve.core.machine import num_cores, parse_cpus
from splitserve.engine.attention.base import StepAttention
from splitserve.engine.fingerprint import begin_fingerprint, file_states, model_fingerprint
from splitserve.engine.kernels.cores import join_table
from splitserve.engine.kernels.library import KernelLibrary, find_library, has_fast_bfloat16
from splitserve.engine.parallel.load import ModelShare, load_share, probe_share
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.probe import LayerShape, depends_on_length, rejection, run_body
from splitserve.engine.quantized.schemes import QuantizationScheme, scheme_of
from splitserve.engine.shared_weights import WholeModel
from splitserve.engine.sources import float_model, has_experts, quantization_of, resolve_model
from splitserve.engine.text_part import multimodal_reason, text_part
from splitserve.engine.whole_model import adapt, find_kernels, load_quantized, load_whole

logger = logging.getLogger(__name__)

# Fraction of the load timeout that ranks wait for each other, so that they report a missing rank before it expires.
_RANKS_FIRST = 0.9
# Types of models that transformers may fail to construct for the probe, and why they are rejected.
_REJECTED_TYPES = {
    "gemma3n": "its later layers read the KV of earlier ones",
    "gemma4_assistant": "it is a draft model that reads the KV of another model",
    "gemma4_unified_assistant": "it is a draft model that reads the KV of another model",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with the properties that the rest of the worker needs."""

    # The causal LM of transformers.
    model: Any
    # Name given by the user, and the folder of its files.
    name: str
    folder: Path
    device: torch.device
    dtype: torch.dtype
    dtype_name: str
    # Maximum number of tokens of a request.
    context_length: int
    vocab_size: int
    # Tokens that end an output; empty if the model has none.
    eos_token_ids: frozenset[int]
    # KV shape of each layer.
    layers: tuple[LayerShape, ...]
    num_parameters: int
    # The kernels in C used by layers of the model; None: torch computes all layers.
    kernels: KernelLibrary | None
    # Equal on two workers only if they serve the same weights, config and tokenizer.
    fingerprint: str
    # Wall time of the load, download included.
    load_seconds: float
    # How the weights of the checkpoint are quantized, e.g. "gptq with 4 bits". Empty: they are not.
    quantization: str = ""
    # This rank's share if several ranks compute the model. Then `layers` and the weights are this rank's only.
    share: ModelShare | None = None

    @property
    def hidden_size(self) -> int:
        """Return the width of the states that the head reads."""
        config = self.model.config.get_text_config()
        # Some OPT models project their states to another width.
        return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)

    def body(self) -> Callable[[torch.Tensor, torch.Tensor, StepAttention], torch.Tensor | None]:
        """Return its layers as one callable: `run_body`, or a stage's part of it."""
        if self.share is None or self.share.meeting is not None:
            return functools.partial(run_body, self.model)
        return functools.partial(self.share.stage.step, self.model, self.share.ranks, self.dtype)


def load_model(
    config: ModelConfig,
    ranks: Ranks | None = None,
    pp_layers: Sequence[int] = (),
    check_share: Callable[[Any], None] | None = None,
) -> LoadedModel:
    """Load a model, or the part of it that this rank of `ranks` computes (`pp_layers`: layers of each stage).

    `check_share`: for a load beside other weights. It is called with this rank's part before the ranks compute anything
    together, and raises ConfigError for a part that is not like the old one.

    Raises ModelLoadError or ConfigError, each with the remedy. Raises RanksLostError if the ranks are out of step.
    """
    began = time.monotonic()
    device = _device(config.device)
    _prepare_process(config, device)
    num_ranks = 1 if ranks is None else ranks.rank.group_size
    share: ModelShare | None = None
    kernels: KernelLibrary | None = None
    timeout = config.load_timeout * _RANKS_FIRST
    with contextlib.nullcontext() if ranks is None or num_ranks == 1 else ranks.loading(timeout):
        folder = source = resolve_model(config.model)
        states, fingerprint = file_states(source), begin_fingerprint(source)
        quantization = quantization_of(folder, config.model)
        if num_ranks > 1:
            folder = float_model(folder)
        checkpoint = _read_config(folder, config.model)
        scheme = _scheme(checkpoint, config)
        context_length = _context_length(checkpoint.get_text_config(), config)
        dtype_name = _dtype_name(config, checkpoint, device, num_ranks)
        if ranks is not None and num_ranks > 1:
            model, share = _build_share(folder, checkpoint, config, dtype_name, ranks, pp_layers)
            _check_unchanged(source, states, fingerprint.result())
            if check_share is not None:
                check_share(model)
    if share is None:
        whole, kernels = _load_whole(folder, checkpoint, config, scheme, dtype_name, device)
        _check_unchanged(source, states, fingerprint.result())
        model, layers, num_parameters = whole.model, whole.facts.layers, whole.facts.num_parameters
    else:
        layers = _probe_share(model, share, config.model, is_beside=check_share is not None)
        num_parameters = share.num_parameters
    return LoadedModel(
        model=model,
        name=config.model,
        folder=folder,
        device=device,
        dtype=getattr(torch, dtype_name),
        dtype_name=dtype_name,
        context_length=context_length,
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(model),
        layers=layers,
        num_parameters=num_parameters,
        kernels=kernels,
        fingerprint=fingerprint.result(),
        load_seconds=time.monotonic() - began,
        quantization=quantization,
        share=share,
    )


def _check_unchanged(folder: Path, states: object, fingerprint: str) -> None:
    """Raise ModelLoadError if files changed since `states`: their fingerprint may not be that of the loaded weights."""
    # OSError, ValueError: a file was removed, or config.json is cut off.
    with contextlib.suppress(OSError, ValueError):
        if file_states(folder) == states or model_fingerprint(folder) == fingerprint:
            return
    raise ModelLoadError(f"The files in {folder} changed while they were loaded. Start again when they are complete.")


def _prepare_process(config: ModelConfig, device: torch.device) -> None:
    """Set cores, threads and the order of sums, which hold for the whole process."""
    _set_affinity(config.cpu_affinity)
    _set_threads(config.threads)
    if not config.deterministic or device.type != "cuda":
        return
    try:
        # Imported here, because Triton comes with torch's builds for GPUs only.
        from splitserve.engine.fixed_order import use_fixed_order
    except ModuleNotFoundError as error:
        raise OptionError("--deterministic", f"needs the Python package {error.name!r} on GPUs: install it") from error
    use_fixed_order()


def _load_whole(
    folder: Path,
    checkpoint: Any,
    config: ModelConfig,
    scheme: QuantizationScheme | None,
    dtype_name: str,
    device: torch.device,
) -> tuple[WholeModel, KernelLibrary | None]:
    """Return the model on one rank, and the kernels in its layers."""
    kernels = find_kernels(config, device, dtype_name, is_quantized=scheme is not None)
    if scheme is None:
        whole = load_whole(folder, checkpoint, config, dtype_name, device, kernels)
    else:
        whole = load_quantized(folder, checkpoint, config, scheme, dtype_name, device, kernels)
    # A worker that was given cores keeps to them.
    if kernels is not None and config.elastic_cores and config.cpu_affinity is None:
        join_table(kernels, torch.get_num_threads())
    return whole, kernels


def _probe_share(model: Any, share: ModelShare, name: str, *, is_beside: bool) -> tuple[LayerShape, ...]:
    """Return the shapes of this rank's layers. `is_beside`: other weights are in use, as in `load_model`."""
    try:
        return probe_share(model, share, name)
    except Exception as error:
        if not is_beside:
            raise
        # The other ranks may wait for this one in the middle of the probe.
        raise RanksLostError(f"model {name} failed in its first step on this rank: {clause(error)}") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # Adds the device's number if the name has none.
        device = torch.empty(0, device=name).device
        if device.type == "cuda":
            # Libraries in this thread then allocate and launch on this device, too.
            torch.cuda.set_device(device)
    except Exception as error:
        raise ConfigError(f"Device {name!r} cannot be used: {clause(error)}. Use auto, cpu, cuda or cuda:N.") from error
    return device


def _set_affinity(cpus: str | None) -> None:
    """Set the CPU affinity. Call before torch starts its thread pools, which inherit it."""
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, parse_cpus(cpus))
    except (ValueError, OSError, AttributeError) as error:
        raise OptionError(
            "--cpu-affinity", f"{cpus!r}: {clause(error)}. Give core numbers of this machine, e.g. 0-3,8."
        ) from error


def _set_threads(threads: int | None) -> None:
    if threads is None:
        threads = num_cores()
    if threads < 1:
        raise ConfigError(f"threads is {threads}: it must be at least 1.")
    torch.set_num_threads(threads)


def _read_config(folder: Path, name: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UnsupportedModelError(
            f"The config of model {name} in {folder} cannot be read: {clause(error)}. Models with own code need a "
            "class in transformers; otherwise check that the folder is complete."
        ) from error
    if reason := _REJECTED_TYPES.get(config.model_type):
        raise rejection(f"{name} ({config.model_type})", reason)
    config = text_part(config, folder, name)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if reason := multimodal_reason(config.to_dict()):
            raise UnsupportedModelError(f"Model {name} {reason}")
        what = "is an encoder-decoder" if config.is_encoder_decoder else "has no class for text generation"
        raise UnsupportedModelError(f"Model {name} {what} ({config.model_type}). Choose a decoder-only model.")
    return config


def _context_length(checkpoint: Any, config: ModelConfig) -> int:
    """Return the configured context, or the model's. Raises ConfigError if it exceeds the model's positions."""
    made_for = getattr(checkpoint, "max_position_embeddings", None)
    # XLNet's relative positions have no limit, which its config writes as -1.
    made_for = None if made_for == -1 else made_for
    if config.context_length is None and made_for is None:
        raise ConfigError(f"Model {config.model} has no context length in its config: set context_length.")
    length = int(config.context_length or made_for or 0)
    if length < 1 or (made_for is not None and length > made_for):
        raise ConfigError(f"context_length is {length}: for model {config.model} it must be in [1, {made_for}].")
    for rope in _rope_parameters(checkpoint):
        original = rope.get("original_max_position_embeddings") or made_for
        if depends_on_length(rope) and (original is None or length > original):
            raise ConfigError(
                f"Model {config.model} changes its positions ({rope['rope_type']} RoPE) for contexts over {original} "
                f"tokens, which would make one request's tokens depend on another's length. "
                f"Set context_length to {original} or less."
            )
    return length


def _rope_parameters(checkpoint: Any) -> Iterator[dict[str, Any]]:
    """Return the RoPE settings, one for all layers or one per type of layer."""
    found = getattr(checkpoint, "rope_parameters", None) or {}
    if "rope_type" in found:
        yield found
    else:
        yield from (rope for rope in found.values() if isinstance(rope, dict))


def _dtype_name(config: ModelConfig, checkpoint: Any, device: torch.device, num_ranks: int) -> str:
    """Return the dtype the model is served in. Raises ConfigError for an unknown one."""
    name = config.dtype
    if name == "auto":
        name = str(checkpoint.dtype or "float32").removeprefix("torch.")
        if device.type == "cpu":
            name = _cpu_dtype_name(name, config, checkpoint, num_ranks)
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known. Use auto, {', '.join(DTYPES)}.")
    return name


def _cpu_dtype_name(checkpoint_dtype: str, config: ModelConfig, checkpoint: Any, num_ranks: int) -> str:
    """Return the checkpoint's dtype (bfloat16 for a quantized one) if our kernels compute it, else float32.

    Quantized checkpoints run in bfloat16, whatever the dtype of their scales. Without these kernels, torch computes
    16 bits several times slower than float32 on CPUs without instructions for them.
    """
    if config.quantization is not None:
        return "bfloat16"
    is_quantized = getattr(checkpoint, "quantization_config", None) is not None
    name = "bfloat16" if is_quantized else checkpoint_dtype
    if name not in ("bfloat16", "float16") or config.kernels != "auto" or num_ranks > 1:
        return "float32"
    # Torch computes experts that our kernels do not support, so experts need it to be fast in this dtype, too.
    is_fast = name == "bfloat16" and has_fast_bfloat16()
    if has_experts(checkpoint.get_text_config().to_dict()) and not is_fast:
        return "float32"
    return name if find_library(getattr(torch, name)) is not None else "float32"


def _scheme(checkpoint: Any, config: ModelConfig) -> QuantizationScheme | None:
    """Return how the checkpoint is quantized; None: it is not. Raises ModelLoadError or ConfigError."""
    scheme = scheme_of(checkpoint.to_dict(), config.model)
    if scheme is not None and config.quantization is not None:
        raise OptionError(
            "--quantization", f"Checkpoint {config.model} is already quantized ({scheme.name}). Remove this option."
        )
    return scheme


def _build_share(
    folder: Path, checkpoint: Any, config: ModelConfig, dtype_name: str, ranks: Ranks, pp_layers: Sequence[int]
) -> tuple[Any, ModelShare]:
    if config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization} is for models on one rank: leave it out, or use one rank."
        )
    if ranks.rank.is_driver and config.kernels == "auto" and (ranks.device.type, dtype_name) == ("cpu", "bfloat16"):
        logger.warning("our kernels for CPUs are for models on one rank: torch's compute this one")
    try:
        model, share = load_share(folder, checkpoint, config, getattr(torch, dtype_name), ranks, pp_layers)
        adapt(model, config.model)
        return model, share
    except SplitserveError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"Rank {ranks.rank.index}'s part of model {config.model} in {folder} cannot be loaded: "
            f"{type(error).__name__}: {clause(error)}. It must be a decoder-only model with safetensors weights and a "
            "model class in transformers; where one rank has the memory for it, use one."
        ) from error


def _eos_token_ids(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
