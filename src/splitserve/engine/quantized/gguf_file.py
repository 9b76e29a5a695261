"""The tensors of a GGUF file under transformers' names, quantized ones in their blocks.

Parsing a GGUF file takes seconds, for its vocabulary. So the folder of a model has a table of the file's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch

from splitserve.engine.parallel.checkpoint import TensorCut
from splitserve.engine.quantized.gguf_blocks import KEPT_TYPES
from splitserve.engine.quantized.schemes import GGUF_FILE, architecture_of

_TABLE_FILE = "gguf-tensors.json"
_FLOATS = {"F32": np.float32, "F16": np.float16}


class _Stored(msgspec.Struct, frozen=True):
    """A tensor in the file. Its last dimension is contiguous."""

    type_name: str
    shape: list[int]
    offset: int
    num_bytes: int

    @property
    def stored_shape(self) -> list[int]:
        """Return the shape in bytes for blocks, in numbers for floats."""
        rows = self.shape[:-1]
        return self.shape if self.type_name in _FLOATS else [*rows, self.num_bytes // math.prod(rows)]


class _Table(msgspec.Struct, frozen=True):
    architecture: str
    tensors: dict[str, _Stored]


def write_tensor_table(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write the table of a file's tensors into `folder`."""
    tensors = {
        t.name: _Stored(t.tensor_type.name, [int(n) for n in reversed(t.shape)], int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    }
    table = _Table(architecture_of(reader), tensors)
    (folder / _TABLE_FILE).write_bytes(msgspec.json.encode(table))


class GgufTensors:
    """The file of a folder, for `WeightLoader`. The tensors in `kept` are read as blocks, others as floats."""

    def __init__(self, folder: Path, model: Any) -> None:
        """`model`: of transformers, with float layers."""
        table = msgspec.json.decode((folder / _TABLE_FILE).read_bytes(), type=_Table)
        # The file that the user named.
        self.place = (folder / GGUF_FILE).resolve()
        self._file = np.memmap(self.place, np.uint8, "r")
        config = model.config
        names = _names_of(table.architecture, config.num_hidden_layers, model.state_dict())
        self._tensors = {name: table.tensors[stored] for name, stored in names.items() if stored in table.tensors}
        self.absent_biases = absent_biases(table.architecture, names, names.keys() - self._tensors.keys())
        # llama.cpp stores the rows of queries and keys of this architecture in another order.
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._heads = heads if table.architecture == "llama" else {}
        self.kept: set[str] = set()

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def type_of(self, name: str) -> str | None:
        """Return the type of a tensor that can stay in its blocks. None: it cannot, or there is no such tensor."""
        tensor = self._tensors.get(name)
        return None if tensor is None or tensor.type_name not in KEPT_TYPES else tensor.type_name

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor as it is stored: blocks have the bytes of a row."""
        return self._tensors[name].stored_shape

    def read(self, name: str, cut: TensorCut = None) -> torch.Tensor:
        """Return a whole tensor; `cut` is None."""
        tensor = self._tensors[name]
        numbers: Any = np.array(self._file[tensor.offset : tensor.offset + tensor.num_bytes])
        numbers = numbers.view(_FLOATS.get(tensor.type_name, np.uint8)).reshape(tensor.stored_shape)
        if name not in self.kept and tensor.type_name not in _FLOATS:
            numbers = gguf.dequantize(numbers, gguf.GGMLQuantizationType[tensor.type_name])
        heads = self._heads.get(name.rsplit(".", 2)[-2])
        if heads:
            numbers = numbers.reshape(heads, -1, 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        return torch.from_numpy(np.ascontiguousarray(numbers))

    def close(self) -> None:
        self._tensors = {}


def _names_of(architecture: str, num_layers: int, names: Iterable[str]) -> dict[str, str]:
    """Return the name in the file of each parameter."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, num_layers)
    split = ((name, *name.rpartition(".")[::2]) for name in names)
    return {name: f"{table.get_name(base)}.{last}" for name, base, last in split}


def absent_biases(architecture: str, names: Iterable[str], missing: Collection[str]) -> set[str]:
    """Return the missing biases of projections that have a bias in no layer of the file: llama.cpp adds none.

    In transformers' model either all projections of attention (or of the MLP) have one, or none.
    """
    found = {name.split(".", 3)[-1] for name in names if name not in missing}
    biases = (name for name in missing if architecture == "llama" and name.endswith(".bias"))
    return {name for name in biases if name.split(".", 3)[-1] not in found}
