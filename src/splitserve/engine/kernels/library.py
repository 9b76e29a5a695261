"""The C functions for this CPU, and their arguments as ctypes structures.

The same sources are built for several instruction sets (`pyproject.toml`); `find_library` loads the best one that this
CPU supports. They call OpenMP without being linked to one: torch's is loaded already, and a second one would start its
own threads. ctypes releases Python's lock during a call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Builds by torch's name for the CPU's capability, best first.
_BUILDS = {"AVX512": ("avx512", "avx2", "any"), "AVX2": ("avx2", "any")}
# Builds for CPUs with further instructions, best first: name and flag of the CPU. With VNNI, products of integers are
# summed in one instruction.
_AVX512_BUILDS = (("avx512bf16", "avx512_bf16"), ("avx512vnni", "avx512_vnni"))
# Limits of attention.c and prompts.c.
MAX_HEAD_SIZE = 256
MAX_GROUP = 16
# Rows that linear.c and w8a8.c convert at a time: the scratch memory must hold their activations.
CHUNK_ROWS = 480

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_uint64


class LinearArgs(ctypes.Structure):
    """struct linear of linear.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("inputs", "panels", "bias", "scales", "outputs", "scratch", "expanded")),
        *((name, _SIZE) for name in ("input_stride", "num_rows", "num_inputs", "num_outputs", "num_panels")),
        ("group", _SIZE),
        *((name, ctypes.c_int32) for name in ("kind", "epilogue", "num_threads", "has_offsets")),
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
        ("num_threads", ctypes.c_int32),
    )


class PromptAttentionArgs(ctypes.Structure):
    """struct prompt_attention of prompts.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("queries", "keys", "values", "outputs", "pages")),
        *((name, _SIZE) for name in ("query_stride", "num_tokens", "start", "window")),
        *((name, _SIZE) for name in ("num_kv_heads", "group", "head_size", "value_size", "page_size")),
        ("scale", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class CallArgs(ctypes.Structure):
    """struct call of program.c."""

    _fields_ = (("share", _POINTER), ("args", _POINTER))


class ProgramArgs(ctypes.Structure):
    """struct program of program.c."""

    _fields_ = (("calls", _POINTER), ("num_calls", _SIZE), ("num_threads", ctypes.c_int32))


def has_fast_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16, which torch's libraries then use."""
    return not _cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16"))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    return frozenset(next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split())


class KernelLibrary:
    """One build. `file`: for tests, which load builds that are not the choice for this CPU."""

    def __init__(self, file: Path) -> None:
        _offer_openmp()
        functions = ctypes.CDLL(str(file))
        # Name of the build: its instruction set.
        self.name = file.name.partition(".")[0].removeprefix("kernels_")
        functions.lanes.restype = _SIZE
        # Floats per vector: the packing of weights depends on it.
        self.lanes = int(functions.lanes())
        functions.multiplies_pairs.restype = _SIZE
        # Whether bfloat16 weights use pairs.c, and prompts use prompts.c.
        self.multiplies_pairs = bool(functions.multiplies_pairs())
        # Maximum number of rows for which bfloat16 linear layers are faster here than in torch; None: any number.
        self.max_bfloat16_rows = self._max_bfloat16_rows()
        self.linear = _function(functions.linear, LinearArgs)
        self.rms_norm = _function(functions.rms_norm, NormArgs)
        self.rotate = _function(functions.rotate, RotateArgs)
        self.store_tokens = _function(functions.store_tokens_share, StoreArgs)
        self.decode_attention = _function(functions.decode_attention, AttentionArgs)
        self.prompt_attention = _function(functions.prompt_attention, PromptAttentionArgs)
        self.run_program = _function(functions.run_program, ProgramArgs)
        # Address of the function that a program calls with such arguments.
        self.shares: dict[type[ctypes.Structure], int] = {
            LinearArgs: _address(functions.linear_share),
            NormArgs: _address(functions.rms_norm_share),
            RotateArgs: _address(functions.rotate_share),
            StoreArgs: _address(functions.store_tokens_share),
            AttentionArgs: _address(functions.decode_attention_share),
        }

    def _max_bfloat16_rows(self) -> int | None:
        """Return the most rows for which this build is faster than torch in bfloat16; None: any number.

        Memory limits few rows. For many rows torch is faster if it has instructions that this build lacks.
        """
        if "amx_bf16" in _cpu_flags():
            return 32 if self.multiplies_pairs else 12
        return 12 if has_fast_bfloat16() and not self.multiplies_pairs else None


def _function(function: ctypes._NamedFuncPointer, args: type[ctypes.Structure]) -> ctypes._NamedFuncPointer:
    function.argtypes = (ctypes.POINTER(args),)
    function.restype = None
    return function


def _address(function: ctypes._NamedFuncPointer) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def find_library() -> KernelLibrary | None:
    """Return the build for this CPU; None if none was built, or none can be loaded."""
    for name in _builds():
        spec = importlib.util.find_spec(f"splitserve._native.kernels_{name}")
        if spec is None or spec.origin is None:
            continue
        try:
            return KernelLibrary(Path(spec.origin))
        except OSError as error:
            logger.warning("the kernels in %s cannot be loaded, torch's are used: %s", spec.origin, error)
    return None


def _builds() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    builds = _BUILDS.get(capability, ("any",))
    if capability == "AVX512":
        return (*(name for name, flag in _AVX512_BUILDS if flag in _cpu_flags()), *builds)
    return builds


def _offer_openmp() -> None:
    """Make torch's OpenMP visible to libraries loaded after this. Raises OSError if there is none."""
    for line in _lines("/proc/self/maps"):
        file = line.split(maxsplit=5)[-1]
        if "/libgomp" in file or "/libiomp5" in file:
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
            return
    raise OSError("torch has no OpenMP here")


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []
