"""One copy of a model's weights for all workers of a host: loaded and packed once, then mapped by every worker.

1. The first worker loads the checkpoint, replaces layers (`kernels/layers.py`), and stores every tensor of the result.
2. It then maps that file, as every later worker does. These do not read the checkpoint. They build the model without
   memory (torch's meta device), replace the same layers, and take each tensor from the mapping.
3. The key of a file covers the bytes of the checkpoint, dtype, quantization, kernels, CPU, and the code of the engine.
   A file that is missing, of another key or damaged is built again.
4. If the file cannot be written or mapped, the worker keeps its private copy.

A module with packed tensors has them as attributes. If it also has their addresses, it has a method `bind`, which
reads the addresses again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import msgspec
import torch
import transformers
import xxhash

from splitserve import __version__
from splitserve.core.environment import cache_dir
from splitserve.core.errors import clause
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.probe import LayerShape
from splitserve.engine.sources import has_experts
from splitserve.engine.weights_file import MappedWeights, UnusableWeightsError, WeightsFolder

logger = logging.getLogger(__name__)

_ENGINE = Path(__file__).parent
# transformers computes this tensor of `longrope` positions in the first step, and overwrites the frequencies in each.
_DERIVED, _OVERWRITTEN = "long_inv_freq", "inv_freq"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a load that are stored beside the weights."""

    layers: tuple[LayerShape, ...]
    num_parameters: int
    # Names of the layers that were replaced by packed ones.
    replaced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model on one rank, with its weights."""

    model: Any
    facts: ModelFacts


def weights_key(fingerprint: str, dtype_name: str, quantization: str | None, library: KernelLibrary | None) -> str:
    """Return the key of a file: equal only if a load now has the same result as the load that wrote the file."""
    kernels = () if library is None else (library.name, library.lanes, library.max_bfloat16_rows)
    versions = (__version__, str(torch.__version__), transformers.__version__)
    key = xxhash.xxh3_128(msgspec.json.encode((fingerprint, dtype_name, quantization, kernels, versions)))
    # The packing is code of this package. A version number is not enough while that code changes.
    for path in sorted(_ENGINE.rglob("*.py")):
        key.update(path.read_bytes())
    if library is not None:
        key.update(library.file.read_bytes())
    return key.hexdigest()


def load_shared(
    read_key: Callable[[], str],
    timeout: float,
    load: Callable[[], WholeModel],
    outline: Callable[[ModelFacts], Any],
) -> WholeModel:
    """Return the model over the mapped file of its key, built first if necessary.

    `load` returns the model with private weights, `outline` the same modules on the meta device. `timeout`: seconds to
    wait for another process that builds. After that, and after any other problem with the file, weights are private.
    """
    folder, key = WeightsFolder(cache_dir() / "weights"), read_key()
    if (found := _take(folder, key, outline)) is not None:
        return found
    whole: WholeModel | None = None
    try:
        with folder.building(timeout):
            if (found := _take(folder, key, outline)) is not None:
                return found
            whole = load()
            if read_key() != key:
                raise UnusableWeightsError("the checkpoint changed while it was loaded")
            folder.store(key, msgspec.json.encode(whole.facts), dict(_tensors(whole.model)))
    except (OSError, filelock.Timeout, UnusableWeightsError) as error:
        logger.warning("weights are private to this worker, because they could not be stored: %s", clause(error))
        return whole or load()
    if (found := _take(folder, key, outline)) is None:
        return whole
    del whole
    return_memory()
    return found


def return_memory() -> None:
    """Return the memory of a dropped model to the system. Its modules refer to each other, and malloc keeps blocks."""
    gc.collect()
    # AttributeError: a C library other than glibc.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _take(folder: WeightsFolder, key: str, outline: Callable[[ModelFacts], Any]) -> WholeModel | None:
    """Return the model over its mapped file. None: there is no such file, or it was unusable and is removed."""
    try:
        mapped = folder.open(key)
        if mapped is None:
            return None
        facts = msgspec.json.decode(mapped.facts, type=ModelFacts)
        model = outline(facts)
        attach(model, mapped)
    except OSError as error:
        logger.warning("the packed weights could not be mapped: %s", clause(error))
        return None
    except Exception as error:
        logger.warning(
            "packed weights are built again, the file was unusable file=%s reason=%s: %s",
            folder.path(key),
            type(error).__name__,
            clause(error),
        )
        folder.remove(key)
        return None
    logger.info("weights are mapped file=%s", mapped.path)
    return WholeModel(model, facts)


def attach(model: torch.nn.Module, mapped: MappedWeights) -> None:
    """Give a model on the meta device its tensors. Raises UnusableWeightsError if names or shapes differ."""
    found = dict(mapped.tensors())
    slots = {name: (module, attribute) for name, module, attribute, _ in _slots(model)}
    if found.keys() != slots.keys():
        different = sorted(found.keys() ^ slots.keys())
        raise UnusableWeightsError(f"it has other tensors than the model: {', '.join(different[:3])}")
    for name, (module, attribute) in slots.items():
        old, new = getattr(module, attribute), found[name]
        if old.shape != new.shape:
            raise UnusableWeightsError(f"{name} is {tuple(new.shape)}, not {tuple(old.shape)}")
        if attribute.endswith(_OVERWRITTEN):
            new = new.clone()
        is_parameter = isinstance(old, torch.nn.Parameter)
        setattr(module, attribute, torch.nn.Parameter(new, requires_grad=False) if is_parameter else new)
    for module in model.modules():
        bind: Callable[[], None] | None = getattr(module, "bind", None)
        if bind is not None:
            bind()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all tensors of a model by name. Raises UnusableWeightsError if it cannot be rebuilt from them."""
    for name, _, _, tensor in _slots(model):
        if not tensor.is_contiguous():
            raise UnusableWeightsError(f"{name} is not contiguous")
        yield name, tensor
    for path, module in model.named_modules():
        has_addresses = any(isinstance(value, (ctypes.Structure, ctypes.Array)) for value in vars(module).values())
        if has_addresses and not hasattr(module, "bind"):
            raise UnusableWeightsError(f"{path} has addresses of its tensors, and no method to renew them")


def _slots(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Return (name, module, attribute, tensor) of each parameter, buffer and other attribute with a tensor."""
    for path, module in model.named_modules():
        for attributes in (module._parameters, module._buffers, vars(module)):
            for attribute, value in attributes.items():
                if isinstance(value, torch.Tensor) and not attribute.endswith(_DERIVED):
                    yield f"{path}.{attribute}", module, attribute, value


def is_shareable(config: Any, device: torch.device, library: KernelLibrary | None) -> bool:
    """Return whether the weights of a model on one rank can be mapped. `config`: of the checkpoint.

    `library`: the kernels in its layers. Packed experts and their routers hold addresses that cannot be renewed.
    """
    is_quantized = getattr(config, "quantization_config", None) is not None
    has_packed_experts = library is not None and has_experts(config.get_text_config().to_dict())
    return device.type == "cpu" and not is_quantized and not has_packed_experts
