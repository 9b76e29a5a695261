"""The experts of a layer (mixture of experts) over weights packed once, and the router that chooses them.

transformers stores the experts of a layer in two tensors, and computes them by functions that all such classes share
(`use_experts_implementation`). `PackedExperts` packs each expert and computes all tokens of a step in one C call
(`experts.c`). A token's result depends on that token only, whatever other tokens choose.

A router is a module of the model with a weight [num_experts, size] and code of its own that makes choices of the
products (softmax or sigmoid, groups, biases). `use_router` replaces only the product with the weight. It also limits
the rows of a call, because some functions of torch have other last bits at the end of a tensor or of a thread's share.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

from splitserve.engine.kernels.library import ExpertsArgs, KernelLibrary, LinearArgs
from splitserve.engine.kernels.weights import Kind, PackedGateUp, PackedLinear, PackedScores, Scratch, epilogue_of

logger = logging.getLogger(__name__)

_CHECKED_TOKENS = 3
# Largest difference of a router's products, relative to the largest one: a rounding.
_TOLERANCE = 0.01
# A tensor of fewer elements is computed by one thread.
_MAX_ELEMENTS = 16384
# Elements of whole vectors.
_VECTOR_ELEMENTS = 64


class PackedExperts(torch.nn.Module):
    """Gated MLPs. Each token uses those that its router chose. Not for two threads at a time."""

    def __init__(self, experts: Any, library: KernelLibrary, scratch: Scratch, rows: Scratch, kind: Kind) -> None:
        """`experts`: the module to replace. `rows`: memory for the rows of a call, shared by all layers."""
        super().__init__()
        self._library = library
        self._scratch = scratch
        self._rows = rows
        epilogue = epilogue_of(experts.act_fn)
        self._gate_ups = [
            PackedGateUp(library, scratch, gate, up, kind, epilogue)
            for gate, up in (weight.chunk(2) for weight in experts.gate_up_proj)
        ]
        self._downs = [PackedLinear(library, scratch, weight, None, kind) for weight in experts.down_proj]
        num_experts = len(self._downs)
        self._gate_up_args = (LinearArgs * num_experts)(*(layer.layer_args for layer in self._gate_ups))
        self._down_args = (LinearArgs * num_experts)(*(layer.layer_args for layer in self._downs))
        self._firsts = torch.empty(num_experts + 1, dtype=torch.int64)
        self._args = ExpertsArgs(
            gate_up=ctypes.addressof(self._gate_up_args),
            down=ctypes.addressof(self._down_args),
            firsts=self._firsts.data_ptr(),
            num_experts=num_experts,
            size=self._gate_ups[0].in_features,
            inner_size=self._downs[0].in_features,
        )

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the chosen experts' results. states [T, size]; chosen, weights [T, choices]."""
        states, chosen, weights = states.contiguous(), chosen.contiguous(), weights.float().contiguous()
        rows, out = torch.empty_like(chosen), torch.empty_like(states)
        args = self._args
        args.inputs, args.chosen, args.weights = states.data_ptr(), chosen.data_ptr(), weights.data_ptr()
        args.outputs, args.rows = out.data_ptr(), rows.data_ptr()
        (args.num_tokens, args.num_chosen), args.num_threads = chosen.shape, self._library.num_threads
        # Two numbers of 16 bits in each float.
        args.gathered = self._rows.address(chosen.numel() * (2 * args.size + args.inner_size) // 2 + 1)
        args.gated = args.gathered + states.itemsize * chosen.numel() * args.size
        args.results = args.gated + states.itemsize * chosen.numel() * args.inner_size
        layers = (self._gate_ups[0], self._downs[0])
        args.scratch = self._scratch.address(max(layer.scratch_floats(chosen.numel()) for layer in layers))
        self._library.experts(ctypes.byref(args))
        return out


def are_known_experts(module: Any, library: KernelLibrary) -> bool:
    """Return whether PackedExperts computes what this module does."""
    if not hasattr(module, "_is_expert_parallel") or module._is_expert_parallel:
        return False
    layout = (module.has_gate, module.is_concatenated, module.is_transposed, module.has_bias)
    return (
        layout == (True, True, False, False)
        and not module.has_post_expert_norm
        # Classes with another gate have a method of their own.
        and type(module)._apply_gate.__module__ == "transformers.integrations.moe"
        and epilogue_of(module.act_fn) is not None
        and module.gate_up_proj.dtype == library.dtype
    )


class RouterWeight(torch.Tensor):
    """Stand-in for a router's weight: the product with it is computed by a packed layer."""

    scores: PackedScores

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and len(args) == 2 and not kwargs:
            return args[1].scores(args[0])
        if func in (torch.Tensor.type, torch.Tensor.to, torch.Tensor.float):
            # The packed layer returns the dtype of its input.
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def is_router(module: Any) -> bool:
    """Return whether it is the router of a layer's experts."""
    return type(module).__name__.lower().endswith("topkrouter")


def use_router(module: Any, library: KernelLibrary, scratch: Scratch) -> bool:
    """Replace a router's product by a packed layer. Return False, and change nothing, if the results differ."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype != library.dtype or weight.ndim != 2:
        # LongCat's router has no weight of its own: it reads that of a linear layer inside it.
        return False
    plain, num_experts = module.forward, len(weight)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_CHECKED_TOKENS, weight.shape[1], generator=generator).to(library.dtype)

    def forward(states: torch.Tensor, *rest: Any) -> Any:
        return _in_blocks(plain, states.reshape(-1, states.shape[-1]), num_experts, rest)

    # Its numbers are never read, so it has none. It has the dtype of the weight.
    stand_in = weight.new_empty(num_experts, 0).as_subclass(RouterWeight)
    stand_in.scores = PackedScores(library, scratch, weight)
    try:
        with torch.inference_mode():
            expected = plain(states)
            del module.weight
            module.weight = stand_in
            # Set on this object, where it hides the method of the class.
            module.forward = forward
            found = module(states)
        problem = _difference(expected[0].float(), found[0].float())
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return True
    logger.warning("%s stays torch's: %s", type(module).__name__, problem)
    vars(module).pop("forward", None)
    vars(module).pop("weight", None)
    module.weight = weight
    return False


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Return what differs between a router's products and those of its replacement; empty if nothing does."""
    if expected.shape != found.shape:
        return f"it returns {list(expected.shape)} numbers, and its replacement {list(found.shape)}"
    largest, difference = float(expected.abs().max()), float((expected - found).abs().max())
    if difference <= _TOLERANCE * largest:
        return ""
    return f"the kernel for it is off by {difference:g} where the largest output is {largest:g}"


def _in_blocks(plain: Callable[..., Any], states: torch.Tensor, num_experts: int, rest: tuple[Any, ...]) -> Any:
    """Call a router for blocks of rows that one thread computes, in whole vectors."""
    num_rows = len(states)
    padding = -num_rows % _VECTOR_ELEMENTS if num_experts % _VECTOR_ELEMENTS else 0
    if (num_rows + padding) * num_experts <= _MAX_ELEMENTS and not padding:
        return plain(states, *rest)
    padded = torch.nn.functional.pad(states, (0, 0, 0, padding))
    block = max(_VECTOR_ELEMENTS, _MAX_ELEMENTS // num_experts // _VECTOR_ELEMENTS * _VECTOR_ELEMENTS)
    parts = [plain(rows, *rest) for rows in torch.split(padded, block)]
    return tuple(torch.cat(values)[:num_rows] for values in zip(*parts, strict=True))
