"""Models with the kernels of a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitserve.engine.kernels.layers import WHOLE, replace_layers
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.kernels.weights import Kind
from splitserve.engine.probe import LayerShape


def use_kernels(model: Any, shapes: Sequence[LayerShape], library: KernelLibrary, kind: Kind = Kind.BF16) -> int:
    """Replace layers, and return their number."""
    return len(set(replace_layers(model, shapes, library, kind)) - {WHOLE})
