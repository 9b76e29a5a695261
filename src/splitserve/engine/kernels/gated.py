"""A gated MLP over packed weights, for decoder layers that are not replaced whole."""

from __future__ import annotations

from typing import Any

import torch

from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.kernels.weights import Kind, PackedGateUp, PackedLinear, Scratch, epilogue_of

# Classes of transformers that compute down(f(gate(x)) * up(x)) and nothing else.
_KNOWN = frozenset(
    f"{family}MLP"
    for family in (
        *("Gemma", "Gemma2", "Gemma3", "Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
        *("DeepseekV2", "DeepseekV3", "Glm4Moe", "Olmo2", "Olmo3"),
    )
)


class PackedGatedMLP(torch.nn.Module):
    """down(f(gate(x)) * up(x)), in two calls. Not for two threads at a time."""

    def __init__(self, mlp: Any, library: KernelLibrary, scratch: Scratch, kind: Kind) -> None:
        super().__init__()
        gate, up, epilogue = mlp.gate_proj.weight, mlp.up_proj.weight, epilogue_of(mlp.act_fn)
        self.gate_up_proj = PackedGateUp(library, scratch, gate, up, kind, epilogue=epilogue)
        self.down_proj = PackedLinear(library, scratch, mlp.down_proj.weight, None, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.gate_up_proj(x))
        return result


def is_gated_mlp(module: Any) -> bool:
    """Return whether PackedGatedMLP computes what this module does."""
    return (
        type(module).__name__ in _KNOWN
        and all(
            type(linear) is torch.nn.Linear and linear.bias is None
            for linear in (module.gate_proj, module.up_proj, module.down_proj)
        )
        and epilogue_of(module.act_fn) is not None
    )
