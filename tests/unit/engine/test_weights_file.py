"""The file of weights: whole or not used, written by one process at a time, and read-only for all."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
import torch

from splitserve.engine import weights_file
from splitserve.engine.weights_file import UnusableWeightsError, WeightsFolder

KEY = "0123"
TENSORS = {
    "matrix": torch.arange(70, dtype=torch.float32).view(7, 10).bfloat16(),
    "scales": torch.linspace(0.0, 1.0, 7),
    "bytes": torch.arange(-3, 3, dtype=torch.int8),
    "number": torch.tensor(5),
    "empty": torch.empty(0, 4),
}
TIMEOUT = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> WeightsFolder:
    return WeightsFolder(tmp_path / "weights")


def store(folder: WeightsFolder, key: str = KEY, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    with folder.building(TIMEOUT):
        folder.store(key, b'{"a":1}', tensors)
    return folder.path(key)


def is_mapped(folder: WeightsFolder, key: str = KEY) -> bool:
    return folder.open(key) is not None


def test_tensors_come_back_bit_for_bit_and_aligned(folder: WeightsFolder) -> None:
    store(folder)
    mapped = folder.open(KEY)
    assert mapped is not None
    assert mapped.facts == b'{"a":1}'
    found = dict(mapped.tensors())
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % 64 == 0


def test_a_tensor_with_two_names_is_stored_once(folder: WeightsFolder) -> None:
    one = torch.randn(1000)
    size = store(folder, tensors={"one": one, "other": one}).stat().st_size
    assert size < 2 * one.nbytes
    mapped = folder.open(KEY)
    assert mapped is not None
    pointers = {tensor.data_ptr() for _, tensor in mapped.tensors()}
    assert len(pointers) == 1


def test_the_mapping_is_shared_and_read_only(folder: WeightsFolder) -> None:
    path = store(folder)
    mapped = folder.open(KEY)
    [line] = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert line.split()[1] == "r--s"
    del mapped


def test_a_write_to_a_mapped_tensor_ends_the_process(folder: WeightsFolder) -> None:
    path = store(folder)
    program = (
        "import sys; from pathlib import Path; from splitserve.engine.weights_file import WeightsFolder\n"
        f"mapped = WeightsFolder(Path({str(path.parent)!r})).open({KEY!r})\n"
        "dict(mapped.tensors())['matrix'].zero_()"
    )
    before = path.read_bytes()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGSEGV
    assert path.read_bytes() == before


def test_no_file_is_not_an_error(folder: WeightsFolder) -> None:
    assert not is_mapped(folder)


@pytest.mark.parametrize("position", ["weights", "header", "tail"])
def test_a_file_with_one_changed_byte_is_rejected(folder: WeightsFolder, position: str) -> None:
    path = store(folder)
    content = bytearray(path.read_bytes())
    content[{"weights": 3, "header": content.index(b'"key"') + 1, "tail": len(content) - 1}[position]] ^= 1
    path.write_bytes(content)
    with pytest.raises(UnusableWeightsError, match="damaged"):
        folder.open(KEY)


@pytest.mark.parametrize("left", [0, 1, 23, 24, 200, -1, -24])
def test_a_truncated_file_is_rejected(folder: WeightsFolder, left: int) -> None:
    path = store(folder)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UnusableWeightsError, match="truncated"):
        folder.open(KEY)


def test_a_file_of_another_key_is_rejected(folder: WeightsFolder) -> None:
    store(folder).rename(folder.path("4567"))
    with pytest.raises(UnusableWeightsError, match="another model"):
        folder.open("4567")


def test_of_two_builders_the_second_waits_and_finds_the_file(folder: WeightsFolder) -> None:
    num_built = 0
    both = threading.Barrier(2)

    def work() -> None:
        nonlocal num_built
        both.wait()
        with WeightsFolder(folder.path(KEY).parent).building(TIMEOUT):
            if not is_mapped(folder):
                num_built += 1
                folder.store(KEY, b"{}", TENSORS)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_built == 1
    assert is_mapped(folder)


def test_a_builder_gives_up_at_its_deadline(folder: WeightsFolder) -> None:
    with folder.building(TIMEOUT), pytest.raises(filelock.Timeout), folder.building(0.0):
        pass


def test_a_killed_builder_leaves_nothing_that_is_used(folder: WeightsFolder) -> None:
    path = folder.path(KEY)
    program = (
        "import os, torch; from pathlib import Path; from splitserve.engine import weights_file\n"
        "weights_file.os.fsync = lambda descriptor: os.kill(os.getpid(), 9)\n"
        f"folder = weights_file.WeightsFolder(Path({str(path.parent)!r}))\n"
        f"with folder.building(60): folder.store({KEY!r}, b'{{}}', {{'a': torch.ones(100)}})"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert [entry.suffix for entry in path.parent.iterdir() if entry.suffix != ".lock"] == [".partial"]
    assert not is_mapped(folder)
    # The lock ended with its process, and the next builder removes what it left.
    store(folder, "4567")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["4567.weights", "build.lock"]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become larger than 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_on_a_full_disk_no_file_appears(folder: WeightsFolder) -> None:
    with pytest.raises(OSError, match="large"):
        store(folder)
    assert [entry.name for entry in folder.path(KEY).parent.iterdir()] == ["build.lock"]


def test_files_that_were_not_used_for_longest_are_removed(
    folder: WeightsFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(weights_file, "_MAX_FILES", 3)
    for age, key in enumerate(["a", "b", "c"]):
        os.utime(store(folder, key), (age, age))
    # This use makes it the newest.
    assert is_mapped(folder, "a")
    store(folder, "d")
    assert [key for key in "abcd" if is_mapped(folder, key)] == ["a", "c", "d"]
    # The reason is the number of files, not the age of one.
    assert f"unused for longest max_files=3 file={folder.path('b')}" in caplog.text
