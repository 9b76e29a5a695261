"""Loading of weights from safetensors files into one rank's share of a model. Only that share is read.

Names, and tensors that a model keeps merged (the experts of a layer), are translated by transformers' own rules. If a
rule only stacks and joins tensors, each tensor is sharded before. Otherwise the rule is applied to whole tensors, and
its result is sharded.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from splitserve.core.errors import UnsupportedModelError
from splitserve.engine.fit import tensor_files
from splitserve.engine.parallel.shards import WeightShard
from splitserve.engine.text_part import text_names

_JOINING = (Concatenate, MergeModulelist)
# Dtypes by their names in safetensors files. Quantized layers have no others.
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
TensorCut = WeightShard | None
# Missing weights that an error names.
_NUM_NAMED = 3


def incomplete(missing: Iterable[str], place: Path | None = None) -> UnsupportedModelError:
    """Return the error for a checkpoint without weights of these names. `place`: GGUF file or folder."""
    names = sorted(missing, key=dot_natural_key)
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    remedy = "Check that all files of the model are there and belong to its config.json, or fetch it again."
    if place is not None and place.suffix.lower() == ".gguf":
        remedy = "Copy the file again, or have it made again from all files of the model."
    where = "" if place is None else f" in {place}"
    return UnsupportedModelError(f"The weights{where} lack {', '.join(names[:_NUM_NAMED])}{more}. {remedy}")


def _is_quantized(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype.itemsize == 1


class TensorSource(Protocol):
    """The tensors of a checkpoint, by name."""

    @property
    def place(self) -> Path:
        """Return the GGUF file, or the folder of safetensors files."""

    def names(self) -> Iterator[str]: ...

    def read(self, name: str, cut: TensorCut) -> torch.Tensor: ...

    def shape(self, name: str) -> list[int]: ...


class Checkpoint:
    """The tensors of a folder, of a multimodal model those of its text part. Call `close` when they are read."""

    def __init__(self, folder: Path) -> None:
        """Open a folder. Raises UnsupportedModelError if it has no safetensors files."""
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self.place = folder
        # Bytes read so far.
        self.bytes_read = 0
        self._file_of = tensor_files(folder)
        if not self._file_of:
            raise UnsupportedModelError(f"{folder} has no safetensors files: no weights to load.")
        # Names in the files, by names in the model.
        self._stored = text_names(folder, self._file_of)

    def names(self) -> Iterator[str]:
        return iter(sorted(self._stored, key=dot_natural_key))

    def read(self, name: str, cut: WeightShard | None) -> torch.Tensor:
        """Return a tensor, or the part of it given by `cut`."""
        whole = self._slice(name)
        num_dims = len(whole.get_shape())
        # A tensor without dimensions cannot be sliced.
        read_all = whole.__getitem__ if num_dims else lambda _: self._file(name).get_tensor(self._stored[name])
        found: torch.Tensor = read_all(slice(None)) if cut is None else cut.of(whole, num_dims)
        self.bytes_read += found.nbytes
        return found

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self._slice(name).get_shape()
        return shape

    def empty(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape and dtype on the meta device."""
        whole = self._slice(name)
        return torch.empty(whole.get_shape(), dtype=_DTYPES[whole.get_dtype()], device="meta")

    def close(self) -> None:
        self._open.clear()
        self._files.close()

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._stored[name])

    def _file(self, name: str) -> Any:
        """Return the open file of a tensor."""
        file = self._file_of[self._stored[name]]
        if file not in self._open:
            opened: Any = safe_open(self.place / file, framework="pt")
            self._open[file] = self._files.enter_context(opened)
        return self._open[file]


class Translation:
    """Translation of names in checkpoints to names in a model. Built from the whole model, before it is sharded."""

    def __init__(self, model: Any) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._whole = dict(model.state_dict())

    def target(self, source: str) -> tuple[str, WeightConverter | None, str]:
        """Return the (first) name in the model, the rule that merges or splits tensors, and the rule's pattern.

        `source`: name in the checkpoint.
        """
        name, pattern = rename_source_key(source, self._renamings, self._converters, self._prefix, self._whole)
        if name not in self._whole and source in self._whole:
            name, pattern = source, None
        rule = next((c for c in self._converters if pattern in c.source_patterns), None)
        return name, rule, pattern or source


class WeightLoader:
    """Loader of one rank's share of a model."""

    def __init__(
        self, model: Any, checkpoint: TensorSource, cuts: Mapping[str, WeightShard], device: torch.device
    ) -> None:
        """`cuts`: shards by name in the model; weights without one are read whole."""
        self._model = model
        self._checkpoint = checkpoint
        self._cuts = cuts
        self._device = device
        self._wanted: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._float32 = set(model._keep_in_fp32_modules_strict or ())
        if model.dtype == torch.float16:
            self._float32 |= set(model._keep_in_fp32_modules or ())

    def load(
        self,
        translation: Translation,
        *,
        renamed: Mapping[str, str] = MappingProxyType({}),
        without: Container[str] = (),
    ) -> None:
        """Load every parameter and persistent buffer.

        `renamed`: names that replace those of `translation`. `without`: names of `translation` that are not read.
        Raises UnsupportedModelError if one is missing, has another shape, or is quantized where the model has floats.
        """
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        rules: dict[str, WeightConverter | None] = {}
        for source in self._checkpoint.names():
            target, rule, pattern = translation.target(source)
            if target not in without:
                rules[target] = rule
                groups[target].append((source, pattern))
        found: set[str] = set()
        for target, parts in groups.items():
            for name, tensor in self._tensors(renamed.get(target, target), parts, rules[target]):
                self._put(name, tensor)
                found.add(name)
        missing = [n for n in self._wanted if n not in found and (n not in without or n in renamed.values())]
        if missing:
            raise incomplete(missing, self._checkpoint.place)

    def _tensors(
        self, name: str, parts: list[tuple[str, str]], rule: WeightConverter | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of the tensors made of `parts`: (name in the file, pattern). May yield nothing."""
        if rule is None:
            if name in self._wanted:
                yield name, self._checkpoint.read(parts[-1][0], self._cuts.get(name))
            return
        if any(name.replace(rule.target_patterns[0], p) in self._wanted for p in rule.target_patterns):
            yield from self._merged(name, parts, copy.deepcopy(rule))

    def _merged(self, name: str, parts: list[tuple[str, str]], rule: Any) -> Iterator[tuple[str, torch.Tensor]]:
        only_joins = len(rule.target_patterns) == 1 and all(isinstance(op, _JOINING) for op in rule.operations)
        held = self._held_of_stack(name, rule) if only_joins else None
        numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
        for source, pattern in parts:
            if held is not None and next(numbers[pattern]) not in held:
                continue
            cut = self._cut_of_source(name, source, pattern, rule) if only_joins and held is None else None
            rule.add_tensor(name, source, pattern, functools.partial(self._checkpoint.read, source, cut))
        for target, made in rule.convert(name, model=self._model, config=self._model.config).items():
            tensor = made[0] if isinstance(made, list) else made
            if target in self._wanted:
                cut = None if only_joins else self._cuts.get(target)
                yield target, tensor if cut is None else cut.of(tensor, tensor.ndim)

    def _held_of_stack(self, name: str, rule: Any) -> range | None:
        """Return which tensors of a stack (one per expert) this rank holds, if it holds whole ones; else None."""
        cut = self._cuts.get(name)
        stacks = any(isinstance(op, MergeModulelist) for op in rule.operations)
        return cut.parts[0] if cut is not None and stacks and cut.dim == -self._wanted[name].ndim else None

    def _cut_of_source(self, name: str, source: str, pattern: str, rule: Any) -> WeightShard | None:
        cut = self._cuts.get(name)
        dim_of_join = next((op.dim for op in rule.operations if isinstance(op, Concatenate)), None)
        if cut is None or dim_of_join is None or dim_of_join - self._wanted[name].ndim != cut.dim:
            return cut
        return cut.of_source(rule.source_patterns.index(pattern), self._checkpoint.shape(source)[cut.dim])

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        wanted = self._wanted[name]
        if tensor.shape != wanted.shape:
            raise UnsupportedModelError(
                f"{name} has the shape {list(tensor.shape)} in {self._checkpoint.place}, and the model's config "
                f"makes it {list(wanted.shape)}."
            )
        if _is_quantized(tensor.dtype) and wanted.dtype.is_floating_point and not _is_quantized(wanted.dtype):
            raise UnsupportedModelError(
                f"{name} in {self._checkpoint.place} is quantized ({tensor.dtype}), without scales that belong to it. "
                "Check that all files of the model are there, or fetch it again."
            )
        dtype = torch.float32 if self._float32 & set(name.split(".")) else wanted.dtype
        tensor = tensor.to(device=self._device, dtype=dtype)
        parent, _, last = name.rpartition(".")
        module = self._model.get_submodule(parent)
        if last in module._parameters:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        setattr(module, last, tensor)
