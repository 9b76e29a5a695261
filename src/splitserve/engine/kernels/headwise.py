"""The projections between heads and latents (`engine/mla.py`) over weights packed once: a linear layer per head.

torch's products of batches of matrices are not used, because their order of sums depends on the number of rows.
"""

from __future__ import annotations

import ctypes

import torch

from splitserve.engine.kernels.library import CallArgs, KernelLibrary, LinearArgs, ProgramArgs
from splitserve.engine.kernels.weights import PackedLinear, Scratch
from splitserve.engine.mla import UpProjection


class PackedUpProjection(UpProjection):
    """Replacement of an UpProjection: a packed layer per head, keys first, then values. One C call computes all heads.

    It has no `weight`, so `by_head` and `rank` are not available. Not for two threads at a time.
    """

    def __init__(self, old: UpProjection, library: KernelLibrary, scratch: Scratch) -> None:
        super().__init__(old.weight, old.key_size, old.value_size)
        keys, values = self.by_head[:, : self.key_size].transpose(1, 2), self.by_head[:, self.key_size :]
        self._library = library
        self._scratch = scratch
        self._layers = [PackedLinear(library, scratch, weight) for weight in (*keys, *values)]
        # Submodules, so that the packed tensors can be mapped from a file.
        self.layers = torch.nn.ModuleList(self._layers)
        del self.weight
        self.bind()

    def bind(self) -> None:
        """Read the addresses of its tensors again."""
        for layer in self._layers:
            layer.bind()
        self._args = (LinearArgs * len(self._layers))(*(layer.layer_args for layer in self._layers))
        kernel, addresses = self._library.kernels[LinearArgs], map(ctypes.addressof, self._args)
        self._calls = (CallArgs * len(self._layers))(*(CallArgs(kernel=kernel, args=args) for args in addresses))

    def to_latents(self, query: torch.Tensor) -> torch.Tensor:
        return self._projected(query, 0)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        return self._projected(mixed, mixed.shape[1])

    def _projected(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Project heads by the layers from `first` on: [T, num_heads, inputs] becomes [T, num_heads, outputs]."""
        if states.stride(-1) != 1:
            states = states.contiguous()
        (num_rows, num_heads, _), layer = states.shape, self._layers[first]
        out = states.new_empty(num_heads, num_rows, layer.out_features)
        scratch, num_threads = self._scratch.address(layer.scratch_floats(num_rows)), self._library.num_threads
        inputs, outputs = states.data_ptr(), out.data_ptr()
        for args in self._args[first : first + num_heads]:
            args.inputs, args.outputs, args.scratch = inputs, outputs, scratch
            args.num_rows, args.input_stride, args.num_threads = num_rows, states.stride(0), num_threads
            inputs, outputs = inputs + states.stride(1) * states.itemsize, outputs + out.stride(0) * out.itemsize
        calls = ctypes.addressof(self._calls[first])
        program = ProgramArgs(calls=calls, num_calls=num_heads, num_threads=num_threads)
        self._library.run_program(ctypes.byref(program))
        return out.transpose(0, 1)
