"""Mixtures of experts: which of transformers' implementations computes a model's.

Its default sorts tokens by expert and multiplies each expert's by that expert's weights in one call (`grouped_mm`),
which asks the device for no number, so that decode steps can be recorded as CUDA graphs. A token's result depends on
its company no more than in any other linear layer. Torch's kernel wants rows of whole 16 bytes; where the weights, or
a rank's part of them, have others, the experts are computed one after the other (`eager`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_ROW_BYTES = 16


def choose_experts(model: Any, name: str) -> None:
    """Set what computes the experts of `model`, whose weights are there."""
    rows = {row for module in model.modules() for row in _rows(module) if row % _ROW_BYTES}
    if rows and model.config.get_text_config()._experts_implementation == "grouped_mm":
        logger.warning(
            "the experts of %s are computed one after the other: rows of %s bytes are not multiples of %d",
            name,
            ", ".join(map(str, sorted(rows))),
            _ROW_BYTES,
        )
        model.set_experts_implementation("eager")


def _rows(module: torch.nn.Module) -> list[int]:
    """Bytes of a row of each weight, where the module is the experts of a layer in transformers' form."""
    if not hasattr(module, "_is_expert_parallel"):
        return []
    return [weight.shape[-1] * weight.element_size() for weight in module.parameters(recurse=False) if weight.ndim == 3]
