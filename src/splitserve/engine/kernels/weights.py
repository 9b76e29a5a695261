"""Linear layers over weights packed once for linear.c.

A packed layer takes bfloat16 rows [..., num_inputs] and returns bfloat16 rows [..., num_outputs]. Sums are float32, so
it is slightly more exact than torch. int8 weights have one scale per output. With INT8, activations stay bfloat16. With
W8A8, each row of them is converted to int8, too, with a scale of its own, and multiplied in integers (w8a8.c). Weights
of quantized checkpoints keep their own codes and scales (`QuantizedMatrix`, codes.h). In a build for float16, all
bfloat16 numbers are float16 instead.
"""

from __future__ import annotations

import ctypes
import enum

import torch

from splitserve.engine.kernels.groups import (
    GROUP_STEP,
    QuantizedMatrix,
    joined,
    pack_groups,
    quantize,
    quantize_outputs,
)
from splitserve.engine.kernels.library import CHUNK_ROWS, KernelLibrary, LinearArgs


class Kind(enum.IntEnum):
    """Storage format of weights, and format of activations in products; enum kind of linear.h."""

    BF16 = 0
    INT8 = 1
    W8A8 = 2
    # BF16 on CPUs with an instruction for pairs of numbers (pairs.c) or for tiles of them (tiles.c).
    PAIRS = 3
    # Codes of 4 bits, of 8 bits and in E4M3, with a scale per output and group of inputs (codes.h).
    GROUPS4 = 4
    GROUPS8 = 5
    FP8 = 6

    @classmethod
    def of(cls, matrix: QuantizedMatrix) -> Kind:
        if matrix.quantizes_rows:
            return cls.W8A8
        if matrix.is_fp8:
            return cls.FP8
        return cls.GROUPS4 if matrix.bits == 4 else cls.GROUPS8

    @property
    def vectors(self) -> int:
        """Vectors of outputs in a panel."""
        return 4 if self is Kind.INT8 else 2


class Epilogue(enum.IntEnum):
    """Operation after the sums of a layer; enum epilogue of linear.h."""

    PLAIN = 0
    SILU_MUL = 1
    GELU_MUL = 2
    FLOATS = 3
    WIDENED = 4


_ACTIVATIONS = {
    "SiLU": Epilogue.SILU_MUL,
    "SiLUActivation": Epilogue.SILU_MUL,
    "GELUTanh": Epilogue.GELU_MUL,
    "PytorchGELUTanh": Epilogue.GELU_MUL,
}


def epilogue_of(activation: object) -> Epilogue | None:
    """Return the epilogue of a gated MLP with this activation; None: there is none."""
    return _ACTIVATIONS.get(type(activation).__name__)


# Number of inputs of one output that a 32-bit word holds, for kinds that store inputs in words.
_INPUTS_A_WORD = {Kind.W8A8: 4, Kind.PAIRS: 2}


class Scratch:
    """Memory for one call at a time, shared by all layers of a model."""

    def __init__(self) -> None:
        self._memory = torch.empty(1, dtype=torch.float32, device="cpu")

    def address(self, num_floats: int) -> int:
        if self._memory.numel() < num_floats:
            self._memory = torch.empty(num_floats, dtype=torch.float32)
        return self._memory.data_ptr()


class PackedLinear(torch.nn.Module):
    """y = x W^T + b, for weight [num_outputs, num_inputs]. Not for two threads at a time.

    The weight is in float32 or bfloat16 and packed as `kind`, or it is quantized and stays so.
    """

    def __init__(
        self,
        library: KernelLibrary,
        scratch: Scratch,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None = None,
        kind: Kind = Kind.BF16,
    ) -> None:
        super().__init__()
        self._library = library
        self._scratch = scratch
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, QuantizedMatrix):
            kind = Kind.of(weight)
        elif kind is Kind.INT8 and library.multiplies_tiles and self.in_features % GROUP_STEP == 0:
            # Tiles multiply such weights in the form of quantized checkpoints.
            weight, kind = quantize_outputs(weight), Kind.GROUPS8
        # Maximum number of rows that these kernels compute; None: any number.
        self.max_rows = library.max_bfloat16_rows if kind is Kind.BF16 else None
        self._plain = None if self.max_rows is None or isinstance(weight, QuantizedMatrix) else weight
        if kind is Kind.BF16 and library.multiplies_pairs:
            kind = Kind.PAIRS
        self._plain_bias = bias
        self._panels, scales = _packed(weight, kind, library)
        padded = self._panels.shape[0] * kind.vectors * library.lanes
        self._bias = _pad(bias, padded)
        self._scales = _pad(scales, padded)
        self._args = LinearArgs(
            num_inputs=self.in_features,
            num_outputs=self.out_features,
            num_panels=self._panels.shape[0],
            kind=kind,
            uses_tiles=library.multiplies_tiles and kind not in (Kind.BF16, Kind.INT8),
        )
        if isinstance(weight, QuantizedMatrix):
            self._args.group, self._args.has_offsets = weight.group, weight.offsets is not None
            self._args.has_halves = weight.has_halves
        self.bind()

    def bind(self) -> None:
        """Read the addresses of its tensors again."""
        self._args.panels = self._panels.data_ptr()
        self._args.bias = None if self._bias is None else self._bias.data_ptr()
        self._args.scales = None if self._scales is None else self._scales.data_ptr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._plain is not None and self.max_rows is not None and len(rows) > self.max_rows:
            return self._by_torch(rows, self._plain).view(*x.shape[:-1], self.out_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        self._fill(self._args, rows, out, self._scratch)
        self._library.linear(ctypes.byref(self._args))
        return out.view(*x.shape[:-1], self.out_features)

    def widened(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `forward` does for contiguous rows [n, num_inputs], as float32 in less time."""
        return self._floats(rows, Epilogue.WIDENED) if self.max_rows is None else self.forward(rows).float()

    @property
    def layer_args(self) -> LinearArgs:
        """Return the arguments that all calls have in common."""
        return LinearArgs.from_buffer_copy(self._args)

    def scratch_floats(self, num_rows: int) -> int:
        """Return the floats of scratch memory that a call needs: `scratch` of struct linear."""
        if self._args.kind >= Kind.PAIRS and self._library.multiplies_pairs:
            return 0
        num_rows = min(num_rows, CHUNK_ROWS)
        if self._args.kind == Kind.W8A8:
            words = 16 * -(-self.in_features // 64) if self._args.uses_tiles else 2 * -(-self.in_features // 4)
            return CHUNK_ROWS + num_rows * words
        return num_rows * (self.in_features + int(self._args.group and self.in_features // self._args.group))

    def args(self, rows: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> LinearArgs:
        """Return arguments for a later call; valid while the tensors and the scratch memory keep their addresses."""
        args = LinearArgs.from_buffer_copy(self._args)
        self._fill(args, rows, out, scratch)
        return args

    def _fill(self, args: LinearArgs, rows: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        args.inputs, args.outputs = rows.data_ptr(), out.data_ptr()
        args.input_stride, args.num_rows = rows.stride(0), len(rows)
        args.num_threads = self._library.num_threads
        args.scratch = scratch.address(self.scratch_floats(len(rows)))

    def _floats(self, rows: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """Return float32 outputs of contiguous rows, by an epilogue that stores such numbers."""
        out = torch.empty(len(rows), self.out_features, dtype=torch.float32)
        args = self.args(rows, out, self._scratch)
        args.epilogue = epilogue
        self._library.linear(ctypes.byref(args))
        return out

    def _by_torch(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight, self._plain_bias)


class PackedScores(PackedLinear):
    """y = x W^T for weights and inputs of 16 bits. y has the dtype of x, which may be float32 with 16-bit numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).to(self._library.dtype).contiguous()
        return self._floats(rows, Epilogue.FLOATS).to(x.dtype).view(*x.shape[:-1], self.out_features)


class PackedGateUp(PackedLinear):
    """f(x Wg^T) * (x Wu^T), the first half of a gated MLP; f is SiLU or GELU."""

    def __init__(
        self,
        library: KernelLibrary,
        scratch: Scratch,
        gate: torch.Tensor | QuantizedMatrix,
        up: torch.Tensor | QuantizedMatrix,
        kind: Kind = Kind.BF16,
        epilogue: Epilogue | None = Epilogue.SILU_MUL,
    ) -> None:
        num_outputs = gate.shape[0]
        super().__init__(library, scratch, _alternating(gate, up, library.lanes), kind=kind)
        self.out_features = num_outputs
        self._args.num_outputs = num_outputs
        assert epilogue is not None
        self._args.epilogue = epilogue
        if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor) and self._plain is not None:
            self._plain = torch.cat([gate, up])

    def _by_torch(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(rows, weight).chunk(2, dim=-1)
        if self._args.epilogue == Epilogue.GELU_MUL:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up


def _packed(
    weight: torch.Tensor | QuantizedMatrix, kind: Kind, library: KernelLibrary
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the panels, and the scales of outputs if they are not in the panels."""
    scales = None
    if isinstance(weight, QuantizedMatrix):
        if kind is not Kind.W8A8:
            return pack_groups(weight, library.lanes), None
        scales = weight.scales[:, 0]
        weight = weight.signed()
    elif kind in (Kind.INT8, Kind.W8A8):
        weight, scales = quantize(weight)
    pack = _pack_inputs if kind in _INPUTS_A_WORD else _pack
    return pack(weight, kind, library.lanes, library.dtype), scales


def _alternating(
    gate: torch.Tensor | QuantizedMatrix, up: torch.Tensor | QuantizedMatrix, lanes: int
) -> torch.Tensor | QuantizedMatrix:
    """Return one matrix in which vectors of outputs of gate and up alternate."""
    num_outputs, num_inputs = gate.shape
    blocks = -(-num_outputs // lanes)
    if isinstance(gate, QuantizedMatrix) and isinstance(up, QuantizedMatrix):
        both = joined([weight.padded(blocks * lanes) for weight in (gate, up)])
        return both.rows(torch.arange(2 * blocks * lanes).view(2, blocks, lanes).transpose(0, 1).flatten())
    assert isinstance(gate, torch.Tensor)
    assert isinstance(up, torch.Tensor)
    padded = gate.new_zeros(2, blocks * lanes, num_inputs)
    padded[0, :num_outputs], padded[1, :num_outputs] = gate, up
    return padded.view(2, blocks, lanes, num_inputs).transpose(0, 1).reshape(-1, num_inputs)


def _pack(weight: torch.Tensor, kind: Kind, lanes: int, dtype: torch.dtype) -> torch.Tensor:
    """Pack BF16 and INT8: [panels, num_inputs, lanes, vectors] of the contents of 32-bit words, lowest bits first.

    In float16: [panels, num_inputs, vectors, lanes].
    """
    num_outputs, num_inputs = weight.shape
    panels = -(-num_outputs // (kind.vectors * lanes))
    padded = torch.zeros(panels * kind.vectors * lanes, num_inputs, dtype=_dtype(kind, dtype))
    padded[:num_outputs] = weight
    order = (0, 3, 1, 2) if padded.dtype is torch.float16 else (0, 3, 2, 1)
    return padded.view(panels, kind.vectors, lanes, num_inputs).permute(order).contiguous()


def _pack_inputs(weight: torch.Tensor, kind: Kind, lanes: int, dtype: torch.dtype) -> torch.Tensor:
    """Pack W8A8 and PAIRS: [panels, words, vectors, lanes, inputs per word]."""
    num_outputs, num_inputs = weight.shape
    a_word, vectors = _INPUTS_A_WORD[kind], kind.vectors
    panels, words = -(-num_outputs // (vectors * lanes)), -(-num_inputs // a_word)
    padded = torch.zeros(panels * vectors * lanes, words * a_word, dtype=_dtype(kind, dtype))
    padded[:num_outputs, :num_inputs] = weight
    return padded.view(panels, vectors, lanes, words, a_word).permute(0, 3, 1, 2, 4).contiguous()


def _dtype(kind: Kind, dtype: torch.dtype) -> torch.dtype:
    return dtype if kind in (Kind.BF16, Kind.PAIRS) else torch.int8


def _pad(values: torch.Tensor | None, size: int) -> torch.Tensor | None:
    if values is None:
        return None
    padded = torch.zeros(size, dtype=torch.float32)
    padded[: len(values)] = values
    return padded
