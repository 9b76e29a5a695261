"""Rotary positions as complex numbers (DeepSeek-V2, Llama 4), multiplied in real numbers.

torch computes a complex product at the end of a tensor by other code than in whole vectors, with other last bits. So a
row's result would depend on the number of rows. The code of the model stays: `use_real_products` changes the type of
the rotations that its layers multiply with.
"""

from __future__ import annotations

from typing import Any

import torch


class Rotations(torch.Tensor):
    """Complex numbers. `x * y` with other complex tensors is computed in real numbers, each step rounded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.mul or not all(isinstance(x, torch.Tensor) and x.is_complex() for x in args):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        (a, b), (c, d) = ((x.real, x.imag) for x in (x.as_subclass(torch.Tensor) for x in args))
        return torch.complex(a * c - b * d, a * d + b * c)


def use_real_products(model: torch.nn.Module) -> None:
    """Make complex rotary positions of a model `Rotations`, by a hook after each rotary embedding."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_as_rotations)


def _as_rotations(module: torch.nn.Module, given: Any, positions: Any) -> Any:
    is_complex = isinstance(positions, torch.Tensor) and positions.is_complex()
    return positions.as_subclass(Rotations) if is_complex else positions
