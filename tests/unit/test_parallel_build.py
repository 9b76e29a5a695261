"""The build of the C extensions: several at the same time, from the same sources with different flags."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest
from setuptools import Extension

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_extensions_of_the_same_source_keep_their_own_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_setup = pytest.importorskip("distutils.core").run_setup
    monkeypatch.chdir(ROOT)
    dist = run_setup("setup.py", script_args=["--quiet"], stop_after="init")
    source = tmp_path / "number.c"
    source.write_text("int number(void) { return NUMBER; }\n")
    dist.ext_modules = [Extension(f"number{i}", [str(source)], extra_compile_args=[f"-DNUMBER={i}"]) for i in range(8)]
    build = dist.get_command_obj("build_ext")
    build.build_lib, build.build_temp = str(tmp_path / "lib"), str(tmp_path / "objects")
    build.ensure_finalized()
    assert build.parallel == len(os.sched_getaffinity(0))
    build.parallel = 8
    build.run()
    libraries = {path.name.partition(".")[0]: ctypes.CDLL(str(path)) for path in (tmp_path / "lib").iterdir()}
    assert {name: library.number() for name, library in libraries.items()} == {f"number{i}": i for i in range(8)}
