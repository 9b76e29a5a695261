"""The C functions for this CPU, and their arguments as ctypes structures.

The same sources are built for several instruction sets (`pyproject.toml`); `find_library` loads the best one that this
CPU supports. Kernels have threads of their own (`_native/pool.c`). ctypes releases Python's lock during a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from splitserve.engine.kernels.cores import CoreTable

logger = logging.getLogger(__name__)

# Builds by torch's name for the CPU's capability, best first. The AVX2 build needs F16C, which a hypervisor can hide.
_BUILDS = {"AVX512": ("avx512", "avx2", "any"), "AVX2": ("avx2", "any")}
# Builds for CPUs with further instructions, best first: name and flag of the CPU. With VNNI, products of integers are
# summed in one instruction.
_AVX512_BUILDS = (("avx512bf16", "avx512_bf16"), ("avx512vnni", "avx512_vnni"))
# Flags of a CPU with the instructions of tiles.c.
_TILE_FLAGS = frozenset(("amx_tile", "amx_bf16", "amx_int8"))
# The same for float16.
_FLOAT16_BUILDS = {"AVX512": ("avx512f16", "avx2f16"), "AVX2": ("avx2f16",)}
# Limits of attend.h and attention.c.
MAX_HEAD_SIZE = 256
MAX_GROUP = 16
# Rows that linear.c and w8a8.c convert at a time: the scratch memory must hold their activations.
CHUNK_ROWS = 480

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_uint64


class LinearArgs(ctypes.Structure):
    """struct linear of linear.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("inputs", "panels", "bias", "scales", "outputs", "scratch")),
        *((name, _SIZE) for name in ("input_stride", "num_rows", "num_inputs", "num_outputs", "num_panels")),
        ("group", _SIZE),
        *((name, ctypes.c_int32) for name in ("kind", "epilogue", "num_threads", "has_offsets", "has_halves")),
        ("uses_tiles", ctypes.c_int32),
    )


class ExpertsArgs(ctypes.Structure):
    """struct experts of experts.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("inputs", "chosen", "weights", "outputs", "gate_up", "down", "firsts", "rows")),
        *((name, _POINTER) for name in ("gathered", "gated", "results", "scratch")),
        *((name, _SIZE) for name in ("num_tokens", "num_chosen", "num_experts", "size", "inner_size")),
        ("num_threads", ctypes.c_int32),
    )


class NormArgs(ctypes.Structure):
    """struct rms_norm of elementwise.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("inputs", "weight", "residual", "outputs")),
        *((name, _SIZE) for name in ("num_rows", "size")),
        ("epsilon", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class RotateArgs(ctypes.Structure):
    """struct rotate of elementwise.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("states", "cos", "sin", "query_norm", "key_norm")),
        *((name, _SIZE) for name in ("stride", "num_rows", "num_query_heads", "num_key_heads", "head_size")),
        ("epsilon", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class StoreArgs(ctypes.Structure):
    """struct store_tokens of elementwise.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("states", "pool", "slots", "zeroed")),
        *((name, _SIZE) for name in ("stride", "num_rows", "size", "num_zeroed")),
    )


class AttentionArgs(ctypes.Structure):
    """struct attention of attention.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("queries", "keys", "values", "outputs", "partials", "tokens", "pages")),
        *((name, _POINTER) for name in ("units", "firsts")),
        *((name, _SIZE) for name in ("query_stride", "pages_stride", "num_requests", "num_units", "num_kv_heads")),
        *((name, _SIZE) for name in ("group", "head_size", "value_size", "page_size")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("num_threads", "uses_tiles")),
    )


class PromptAttentionArgs(ctypes.Structure):
    """struct prompt_attention of prompts.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("queries", "keys", "values", "outputs", "pages")),
        *((name, _SIZE) for name in ("query_stride", "num_tokens", "start", "window")),
        *((name, _SIZE) for name in ("num_kv_heads", "group", "head_size", "value_size", "page_size")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("num_threads", "uses_tiles")),
    )


class LatentAttentionArgs(ctypes.Structure):
    """struct latent_attention of latents.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("queries", "latents", "outputs", "partials")),
        *((name, _POINTER) for name in ("pages", "units", "sizes", "items", "firsts")),
        *((name, _SIZE) for name in ("pages_stride", "num_units", "num_items", "num_heads")),
        *((name, _SIZE) for name in ("size", "value_size", "page_size")),
        ("scale", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class CallArgs(ctypes.Structure):
    """struct call of program.c."""

    _fields_ = (("kernel", _POINTER), ("args", _POINTER))


class ProgramArgs(ctypes.Structure):
    """struct program of program.c."""

    _fields_ = (("calls", _POINTER), ("num_calls", _SIZE), ("num_threads", ctypes.c_int32))


def has_fast_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16, which torch's libraries then use."""
    return not _cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16"))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    return frozenset()


class KernelLibrary:
    """One build. `file`: for tests, which load builds that are not the choice for this CPU."""

    def __init__(self, file: Path, *, for_all_rows: bool = False) -> None:
        """`for_all_rows`: compute any number of rows, even if torch is faster for many."""
        functions = ctypes.CDLL(str(file))
        self.file = file
        # Whether PAIRS, W8A8 and attention use tiles, for any number of rows: sums have another order than in pairs.c.
        self.multiplies_tiles = _cpu_flags() >= _TILE_FLAGS and bool(_number(functions.request_tiles))
        # Name of the instruction set: that of the build, or "amx".
        self.name = "amx" if self.multiplies_tiles else file.name.partition(".")[0].removeprefix("kernels_")
        # Floats per vector: the packing of weights depends on it.
        self.lanes = _number(functions.lanes)
        # Dtype of weights that are not quantized, of activations and of the pool.
        self.dtype = torch.float16 if _number(functions.computes_float16) else torch.bfloat16
        # Whether bfloat16 weights are stored as pairs, for pairs.c or tiles.c.
        self.multiplies_pairs = self.multiplies_tiles or bool(_number(functions.multiplies_pairs))
        # This process's row of the host's cores. None: it uses torch's number of threads.
        self.cores: CoreTable | None = None
        functions.share_cores.argtypes = (_POINTER, _SIZE, _SIZE, _SIZE)
        functions.share_cores.restype = None
        self.share_cores = functions.share_cores
        functions.threads_allowed.restype = _SIZE
        self.threads_allowed = functions.threads_allowed
        # Maximum number of rows for which bfloat16 linear layers are faster here than in torch; None: any number.
        self.max_bfloat16_rows = None if for_all_rows else self._max_bfloat16_rows()
        self.linear = _function(functions.linear, LinearArgs)
        self.experts = _function(functions.experts, ExpertsArgs)
        self.rms_norm = _function(functions.rms_norm, NormArgs)
        self.rotate = _function(functions.rotate, RotateArgs)
        self.store_tokens = _function(functions.store_tokens, StoreArgs)
        self.decode_attention = _function(functions.decode_attention, AttentionArgs)
        self.prompt_attention = _function(functions.prompt_attention, PromptAttentionArgs)
        self.latent_attention = _function(functions.latent_attention, LatentAttentionArgs)
        # Sizes of latents.c: rows of a unit, keys of a part, floats of a unit's partial sums.
        sizes = (functions.latent_rows, functions.latent_part, functions.latent_partials)
        self.latent_rows, self.latent_part, self.latent_partials = (_number(size) for size in sizes)
        self.run_program = _function(functions.run_program, ProgramArgs)
        # Address of the kernel that a program calls with such arguments.
        self.kernels: dict[type[ctypes.Structure], int] = {
            LinearArgs: _address(functions, "linear_kernel"),
            NormArgs: _address(functions, "rms_norm_kernel"),
            RotateArgs: _address(functions, "rotate_kernel"),
            StoreArgs: _address(functions, "store_tokens_kernel"),
            AttentionArgs: _address(functions, "attention_kernel"),
            PromptAttentionArgs: _address(functions, "prompt_attention_kernel"),
        }

    @property
    def num_threads(self) -> int:
        """Return how many threads may share a kernel. With `cores`, only those that have a core now take tasks."""
        return torch.get_num_threads() if self.cores is None else self.cores.num_cores

    def computing(self, *, has_prompts: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a step is computed."""
        return contextlib.nullcontext() if self.cores is None else self.cores.computing(has_prompts=has_prompts)

    def _max_bfloat16_rows(self) -> int | None:
        """Return the most rows for which this build is faster than torch in bfloat16; None: any number.

        Memory limits few rows. For many rows torch is faster if it has instructions that this build lacks.
        """
        if self.dtype is torch.float16:
            return None
        return 12 if has_fast_bfloat16() and not self.multiplies_pairs else None


def _function(function: ctypes._NamedFuncPointer, args: type[ctypes.Structure]) -> ctypes._NamedFuncPointer:
    function.argtypes = (ctypes.POINTER(args),)
    function.restype = None
    return function


def _number(function: ctypes._NamedFuncPointer) -> int:
    function.restype = _SIZE
    return int(function())


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


@functools.cache
def find_library(dtype: torch.dtype = torch.bfloat16, *, for_all_rows: bool = False) -> KernelLibrary | None:
    """Return the build for this CPU; None if none was built, or none can be loaded. See KernelLibrary."""
    for name in _builds() if dtype is torch.bfloat16 else _float16_builds():
        spec = importlib.util.find_spec(f"splitserve._native.kernels_{name}")
        if spec is None or spec.origin is None:
            continue
        try:
            return KernelLibrary(Path(spec.origin), for_all_rows=for_all_rows)
        except OSError as error:
            logger.warning("the kernels in %s cannot be loaded, torch's are used: %s", spec.origin, error)
    return None


def _builds() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    has_f16c = "f16c" in (_cpu_flags() or ("f16c",))
    builds = tuple(name for name in _BUILDS.get(capability, ("any",)) if name != "avx2" or has_f16c)
    if capability == "AVX512":
        return (*(name for name, flag in _AVX512_BUILDS if flag in _cpu_flags()), *builds)
    return builds


def _float16_builds() -> tuple[str, ...]:
    return _FLOAT16_BUILDS.get(torch.backends.cpu.get_cpu_capability(), ()) if "f16c" in _cpu_flags() else ()
