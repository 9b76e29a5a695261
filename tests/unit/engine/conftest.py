"""Builds of the kernels, and tiny models made once for all tests of the engine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock

import splitserve._native
from splitserve.core.config import ModelConfig
from splitserve.core.machine import num_cores
from splitserve.engine.kernels import library as kernel_library
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.loader import LoadedModel, load_model
from support.tiny_models import TinyKind, make_tiny_model

NATIVE = Path(splitserve._native.__file__).parent
SOURCES = (
    "linear",
    "w8a8",
    "pairs",
    "groups",
    "float_groups",
    "tiled_groups",
    "elementwise",
    "attention",
    "prompts",
    "program",
    "pool",
    "experts",
    "latents",
    "tiles",
)
TILE_REFERENCE = Path(__file__).parents[2] / "support" / "tile_reference.h"
OWN = find_library()
# The narrowest build, the one for this CPU, and where that has narrower vectors one with those of 64 bytes, in parts.
BUILDS = ("any", "this", "wide") if OWN is None or OWN.lanes < 16 else ("any", "this")


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    """One of the builds. Tests that use it are skipped if there is none."""
    if OWN is None:
        pytest.skip("installed without a C compiler")
    if request.param == "this":
        return OWN
    if request.param == "any":
        spec = importlib.util.find_spec("splitserve._native.kernels_any")
        assert spec is not None
        assert spec.origin is not None
        # On some CPUs torch would compute more than 12 rows, with other last bits.
        return KernelLibrary(Path(spec.origin), for_all_rows=True)
    wide: KernelLibrary = request.getfixturevalue("wide_library")
    return wide


@pytest.fixture(scope="session")
def wide_library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The build with vectors of 64 bytes and without products of pairs: on a CPU without AVX-512 in parts."""
    if OWN is not None and OWN.lanes == 16:
        return KernelLibrary(next(NATIVE.glob("kernels_avx512.*")), for_all_rows=True)
    return KernelLibrary(_made_once(tmp_path_factory, "wide", _make_wide), for_all_rows=True)


def _made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """Build a library once for all test processes of a run. `make` builds it in the folder that it receives."""
    root = factory.getbasetemp()
    target = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"kernels_{name}.so"
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            # Libraries that it requires stay in that folder: it has their paths.
            make(factory.mktemp(name)).rename(target)
    return target


def _compile_all(folder: Path, names: Sequence[str], *flags: str) -> list[Path]:
    """Compile sources on all cores."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    command = (compiler, "-pthread", "-fno-math-errno", "-fPIC", "-DVECTOR_BYTES=64", "-w", *flags)
    objects = [folder / f"{name}.o" for name in names]

    def compile_one(made: Path) -> None:
        source = NATIVE / f"{made.stem}.c"
        subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True)

    with ThreadPoolExecutor(num_cores()) as pool:
        list(pool.map(compile_one, objects))
    return objects


def _link(target: Path, *inputs: Path) -> Path:
    # Linkers may drop a library that the objects themselves do not use.
    command = ["gcc", "-shared", "-Wl,--no-as-needed", *map(str, inputs), "-o", str(target), "-lm"]
    subprocess.run(command, check=True)
    return target


def _make_wide(folder: Path) -> Path:
    return _link(folder / "kernels_wide.so", *_compile_all(folder, SOURCES, "-O1"))


@pytest.fixture(scope="session")
def tiled_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The build of a CPU with AMX: what uses the instructions, over these in plain C, and a copy of another build.

    The copy is loaded as a requirement of the new library, so it finds the functions of such files there first.
    """
    if OWN is None:
        pytest.skip("installed without a C compiler")
    other = OWN.file if OWN.lanes == 16 else request.getfixturevalue("wide_library").file

    def make(folder: Path) -> Path:
        names = ("tiles", "tiled_groups", "attention", "prompts", "peak")
        # With -O2 the instructions in plain C take four to eight times as long.
        objects = _compile_all(folder, names, "-O3", "-march=native", f'-DTILE_REFERENCE="{TILE_REFERENCE}"')
        return _link(folder / "kernels_tiles.so", *objects, Path(shutil.copy(other, folder / "base.so")))

    target = _made_once(tmp_path_factory, "tiles", make)
    with patch.object(kernel_library, "_cpu_flags", lambda: frozenset(("amx_tile", "amx_bf16", "amx_int8"))):
        library = KernelLibrary(target)
    assert library.multiplies_tiles
    return library


@pytest.fixture(scope="session", params=["reference", "cpu"])
def tiled(request: pytest.FixtureRequest, tiled_library: KernelLibrary) -> KernelLibrary:
    """The build of a CPU with AMX: over the instructions in plain C, and on a CPU that has them over its own."""
    if request.param == "reference":
        return tiled_library
    if OWN is None or not OWN.multiplies_tiles:
        pytest.skip("this CPU has no AMX")
    return OWN


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyKind], Path]:
    """The folder of a tiny model, made on first use."""
    root = tmp_path_factory.mktemp("tiny-models")

    def folder(kind: TinyKind) -> Path:
        path = root / kind
        return path if path.exists() else make_tiny_model(kind, path)

    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[TinyKind], Path]) -> Callable[[TinyKind], LoadedModel]:
    """A tiny model, loaded on first use. In float32 on one CPU thread."""
    loaded: dict[TinyKind, LoadedModel] = {}

    def load(kind: TinyKind) -> LoadedModel:
        if kind not in loaded:
            loaded[kind] = load_model(ModelConfig(model=str(tiny_folder(kind)), device="cpu", threads=1))
        return loaded[kind]

    return load


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def instructions_of_build() -> Callable[..., bytes]:
    """Return the instructions of the build for bfloat16, by objdump with these options."""
    objdump = shutil.which("objdump")
    files = list(Path(kernel_library.__file__).parents[2].glob("_native/kernels_avx512bf16.*so"))
    if objdump is None or not files:
        pytest.skip("no objdump, or a compiler without AVX512-BF16")
    return lambda *options: subprocess.run([objdump, *options, files[0]], capture_output=True, check=True).stdout
