"""Layers that hold quantized weights as the checkpoint stores them, until our kernels replace them.

They compute with dequantized weights, layer by layer in each call: slow, but right. The probe needs that, and the
comparison of each kernel with the layer that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gguf
import torch

from splitserve.core.errors import EngineError, clause
from splitserve.engine.kernels.groups import QuantizedMatrix, joined

Unpack = Callable[[Mapping[str, torch.Tensor]], QuantizedMatrix]


class QuantizedLinear(torch.nn.Module):
    """A linear layer with the tensors of a checkpoint as its parameters."""

    bias: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, tensors: Mapping[str, torch.Tensor], unpack: Unpack, has_bias: bool
    ) -> None:
        """`tensors`: by the last part of their names, of the checkpoint's shapes and dtypes. unpack: of the scheme."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._names = tuple(tensors)
        self._unpack = unpack
        self._kept: QuantizedMatrix | None = None
        # The output is 0, without work: for runs in which only shapes matter.
        self.is_silent = False
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        bias = torch.nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if has_bias else None
        self.register_parameter("bias", bias)

    def matrix(self) -> QuantizedMatrix:
        if self._kept is not None:
            return self._kept
        try:
            matrix = self._unpack({name: getattr(self, name).data for name in self._names})
        except ValueError as error:
            raise EngineError(f"a quantized layer has an unsupported layout: {clause(error)}") from error
        # A head may be padded.
        return matrix if matrix.shape[0] == self.out_features else matrix.rows(torch.arange(self.out_features))

    def keep(self, matrix: QuantizedMatrix | None) -> None:
        """Keep the unpacked matrix for the next calls, or drop it."""
        self._kept = matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_silent:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.matrix().dequantize(x.dtype), bias)


class QuantizedEmbedding(torch.nn.Module):
    """An embedding in GGUF blocks. The rows of a step's tokens are dequantized."""

    def __init__(self, num_rows: int, tensor: torch.Tensor, type_name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = num_rows
        self.weight = torch.nn.Parameter(tensor, requires_grad=False)
        self._type = gguf.GGMLQuantizationType[type_name]
        self._dtype = dtype

    def dequantize(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers of blocks uint8 [n, bytes of a row]."""
        return torch.from_numpy(gguf.dequantize(rows.numpy(), self._type)).to(self._dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dequantize(self.weight.data[ids.flatten()]).view(*ids.shape, -1)


# Layers that our kernels can replace.
LINEAR = (torch.nn.Linear, QuantizedLinear)
_Linear = torch.nn.Linear | QuantizedLinear


def weight_of(linear: _Linear) -> torch.Tensor | QuantizedMatrix:
    return linear.matrix() if isinstance(linear, QuantizedLinear) else linear.weight


def are_alike(linears: Sequence[_Linear]) -> bool:
    """Return whether the weights of these layers can be rows of one matrix."""
    quantized = [linear.matrix() for linear in linears if isinstance(linear, QuantizedLinear)]
    return not quantized or (len(quantized) == len(linears) and all(quantized[0].is_like(m) for m in quantized))


def joined_weight(linears: Sequence[_Linear]) -> torch.Tensor | QuantizedMatrix:
    """Return the weights of all these layers, which are alike, as one."""
    weights = [weight_of(linear) for linear in linears]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    return joined(quantized) if quantized else torch.cat([w for w in weights if isinstance(w, torch.Tensor)])


def joined_bias(linears: Sequence[_Linear]) -> torch.Tensor | None:
    """Return the biases of all these layers as one. None: no layer has a bias."""
    given = next((linear.bias for linear in linears if linear.bias is not None), None)
    if given is None:
        return None
    return torch.cat([given.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears])


def quantized_layers(module: torch.nn.Module) -> list[QuantizedLinear]:
    return [part for part in module.modules() if isinstance(part, QuantizedLinear)]


def quantizes_rows(module: torch.nn.Module) -> bool:
    """Return whether a layer in `module` quantizes activations."""
    return any(layer.matrix().quantizes_rows for layer in quantized_layers(module))


@contextmanager
def silent_layers(model: Any) -> Iterator[None]:
    """Let the quantized layers of `model`, except its head, return 0 without work."""
    layers = [layer for layer in quantized_layers(model) if layer is not model.get_output_embeddings()]
    for layer in layers:
        layer.is_silent = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_silent = False


@contextmanager
def unpacked_once(module: torch.nn.Module) -> Iterator[None]:
    """Unpack the quantized weights of a decoder layer or linear layer once, not in each use."""
    layers = quantized_layers(module) if _is_small(module) else []
    for layer in layers:
        layer.keep(layer.matrix())
    try:
        yield
    finally:
        for layer in layers:
            layer.keep(None)


def _is_small(module: torch.nn.Module) -> bool:
    """Return whether `module` is one layer, not a list of decoder layers or more."""
    return not any(isinstance(part, torch.nn.ModuleList) for part in module.modules())


def dequantize_layers(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Replace all quantized layers of `model` by those of torch in `dtype`; return their number."""
    # A tied head has the tensor of the embedding.
    done: dict[int, Any] = {}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = _dequantized(child, dtype)
            if new is not None:
                tensor = next(child.parameters())
                new.weight = done.setdefault(id(tensor), new.weight)
                setattr(parent, name, new)
                count += 1
    return count


def _dequantized(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Linear | torch.nn.Embedding | None:
    if isinstance(layer, QuantizedEmbedding):
        weight = layer.dequantize(layer.weight.data).to(dtype)
        return torch.nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)
    if not isinstance(layer, QuantizedLinear):
        return None
    new = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    new.weight = torch.nn.Parameter(layer.matrix().dequantize(dtype), requires_grad=False)
    if layer.bias is not None:
        new.bias = torch.nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return new
