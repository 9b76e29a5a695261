"""Limits of this machine for the steps of a model, and the share of them that a server reaches.

Memory limits a decode step: it reads all weights once, and the KV of every running sequence. Arithmetic limits a
prompt, and a decode step of many sequences. The limits are measured in the same run, by as many threads.

read        Throughput of a plain read of memory.
multiply    Multiply-adds per second of the instruction in our linear layers, with all operands in registers
            (`_native/peak.c`), or of a matrix product of torch if that is faster.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from splitserve.core.config import ModelConfig
from splitserve.core.machine import num_cores
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.pool import layout_for
from splitserve.tools.bench.engine_steps import PAGE_SIZE, decode_gb, prompt_flops, weight_bytes
from splitserve.tools.bench.stats import Figures, seconds_of

# Targets of this project: share of the limit that decode and prefill reach.
LEAST_READ, LEAST_MULTIPLY = 0.85, 0.75
# Bytes of the plain read: much larger than a cache.
READ_BYTES = 1 << 30
# Rounds of peak.c, some 10 ms, and rows of torch's square matrices.
_ROUNDS, _MATRIX_ROWS = 1_000_000, 1024
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    # 10^9 bytes and multiply-adds per second, of all cores.
    read_gb_per_s: float
    gmultiply_per_s: float
    # Instruction of the multiply-adds.
    instruction: str

    def or_higher(self, other: MachineLimits) -> MachineLimits:
        """Return the higher one of each limit. A limit that is too low would flatter the servers."""
        most = max(self, other, key=lambda limits: limits.gmultiply_per_s)
        return MachineLimits(max(self.read_gb_per_s, other.read_gb_per_s), most.gmultiply_per_s, most.instruction)


def measure_limits(dtype: str, num_bytes: int = READ_BYTES) -> MachineLimits:
    """Measure the limits of a model in `dtype`, which takes a second or two. `num_bytes`: size of the plain read."""
    peaks = [(matmul_gmultiply_per_s(dtype), f"torch's product of matrices in {dtype}")]
    library = find_library() if dtype == "float32" else find_library(getattr(torch, dtype))
    if library is not None:
        of_pairs = dtype == "bfloat16" and library.multiplies_pairs
        pairs = "products of bfloat16 " + ("tiles" if library.multiplies_tiles else "pairs")
        name = pairs if of_pairs else "multiply-adds of float32"
        peaks.append((peak_gmultiply_per_s(library, of_pairs=of_pairs), f"{name} in registers ({library.name})"))
    return MachineLimits(read_gb_per_s(num_bytes), *max(peaks))


def read_gb_per_s(num_bytes: int) -> float:
    """Return the throughput of reading that much memory with torch's threads, in 10^9 bytes per second.

    The result is the best of several reads and of two reductions. A limit that is too low would flatter the engine.
    """
    block = torch.ones(num_bytes // 4, dtype=torch.float32)
    return num_bytes / min(_least_seconds(block.sum), _least_seconds(block.amax)) / 1e9


def peak_gmultiply_per_s(library: KernelLibrary, *, of_pairs: bool, rounds: int = _ROUNDS) -> float:
    """Return the peak of a build's multiply-adds on all cores, in 10^9 per second."""
    functions = ctypes.CDLL(str(library.file))
    of_tiles = of_pairs and library.multiplies_tiles
    function = functions.multiply_adds_of_tiles if of_tiles else functions.multiply_adds
    function.argtypes = (ctypes.c_uint64,) if of_tiles else (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)
    function.restype = ctypes.c_uint64

    def compute(_: int) -> int:
        if of_tiles:
            return int(function(rounds))
        # Small factors, so that no sum becomes infinite or subnormal.
        operands = (ctypes.c_float * (2 * library.lanes))(*([0.5] * (2 * library.lanes)))
        return int(function(rounds, of_pairs, operands))

    threads = range(num_cores())
    with ThreadPoolExecutor(len(threads)) as pool:
        count = sum(pool.map(compute, threads))
        return count / _least_seconds(lambda: list(pool.map(compute, threads))) / 1e9


def matmul_gmultiply_per_s(dtype: str, rows: int = _MATRIX_ROWS) -> float:
    """Return the multiply-adds of torch's product of two square matrices, in 10^9 per second."""
    matrix = torch.ones(rows, rows, dtype=getattr(torch, dtype))
    matrix @ matrix
    return float(rows**3 / _least_seconds(lambda: matrix @ matrix) / 1e9)


def _least_seconds(run: Callable[[], object]) -> float:
    return min(seconds_of(run) for _ in range(_REPEATS))


@dataclass(frozen=True, slots=True)
class RequiredWork:
    """Work that no server can avoid. Weights and KV have the dtype of the comparison."""

    # 10^9 bytes that a decode step reads: all weights, and the KV of all streams. None: it is work of prompts.
    step_gb: float | None
    # 10^9 multiply-adds of a decode step, or of a token of a prompt.
    gmultiply: float

    @classmethod
    def of_decode(cls, loaded: LoadedModel, num_streams: int, context: int) -> RequiredWork:
        """Return the work of a step with `context` tokens per stream: layers, attention and logits."""
        layout = layout_for(loaded.layers, loaded.dtype_name, page_size=PAGE_SIZE, num_pages=1)
        layers = (prompt_flops(loaded, context) - prompt_flops(loaded, context - 1)) / 2
        logits = loaded.model.get_output_embeddings().weight.numel()
        step_gb = decode_gb(weight_bytes(loaded.model), layout, num_streams, context)
        return cls(step_gb, num_streams * (layers + logits) / 1e9)

    @classmethod
    def of_prompt(cls, loaded: LoadedModel, num_tokens: int) -> RequiredWork:
        """Return the work of a prompt, without its logits, per token."""
        return cls(None, prompt_flops(loaded, num_tokens) / 2 / num_tokens / 1e9)

    def with_shares(self, figures: Figures, limits: MachineLimits) -> Figures:
        """Return the figures of a scenario with the work and its shares of the limits.

        A decode step takes the median gap between tokens. Shares are NaN if answers in one frame have no gap.
        """
        if self.step_gb is None:
            share = figures["prompt_tokens_per_second"] * self.gmultiply / limits.gmultiply_per_s
            return figures | {"token_gmultiply": self.gmultiply, "multiply_share": share}
        seconds = figures["itl_p50"] or math.nan
        return figures | {
            "step_gb": self.step_gb,
            "step_gmultiply": self.gmultiply,
            "read_share": self.step_gb / seconds / limits.read_gb_per_s,
            "multiply_share": self.gmultiply / seconds / limits.gmultiply_per_s,
        }


def load_plain(folder: str, dtype: str) -> LoadedModel:
    """Load a model without our kernels and their packed weights. Raises ModelLoadError."""
    config = ModelConfig(model=folder, dtype=dtype, device="cpu", kernels="torch", share_weights=False)
    return load_model(config)
