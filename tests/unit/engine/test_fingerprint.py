"""The fingerprint covers every byte of a model, and unchanged files are hashed once."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.engine import fingerprint
from splitserve.engine.fingerprint import begin_fingerprint, model_fingerprint
from support.tiny_models import TinyKind, make_tiny_model

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fingerprints"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that were read."""
    names: list[str] = []
    compute = fingerprint._hash

    def record(path: Path, size: int) -> str:
        names.append(path.name)
        return compute(path, size)

    monkeypatch.setattr(fingerprint, "_hash", record)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model of some megabytes, in several pieces. Its files count as complete at once."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -1)
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(fingerprint, "_READ_BYTES", MIB // 4)
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "5.0"}))
    (made / "model.safetensors").write_bytes(os.urandom(8 * MIB + 123))
    (made / "tokenizer.json").write_text('{"model": {}}')
    (made / "README.md").write_text("about it")
    return made


def change(path: Path, offset: int, length: int) -> None:
    """Other bytes there; size and modification time stay."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 255 for byte in before))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_models_differ_and_copies_do_not(tiny_folder: Callable[[TinyKind], Path], tmp_path: Path) -> None:
    llama = model_fingerprint(tiny_folder("llama"))
    assert model_fingerprint(make_tiny_model("llama", tmp_path / "copy")) == llama
    assert model_fingerprint(make_tiny_model("llama", tmp_path / "other", seed=1)) != llama
    assert model_fingerprint(tiny_folder("qwen3")) != llama
    assert begin_fingerprint(tiny_folder("llama")).result() == llama


@pytest.mark.parametrize("offset", [0, MIB - 1, 3 * MIB, 5 * MIB + 17, 8 * MIB + 122])
def test_any_changed_byte_of_the_weights_shows(folder: Path, offset: int) -> None:
    before = model_fingerprint(folder)
    change(folder / "model.safetensors", offset, 1)
    assert model_fingerprint(folder) != before
    change(folder / "model.safetensors", offset, 1)
    assert model_fingerprint(folder) == before


def test_two_megabytes_of_other_weights_show(folder: Path) -> None:
    before = model_fingerprint(folder)
    change(folder / "model.safetensors", 3 * MIB, 2 * MIB)
    assert model_fingerprint(folder) != before


def test_config_and_tokenizer_are_part_of_it_and_their_history_is_not(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "README.md").write_text("something else")
    (folder / "config.json").write_text(json.dumps({"transformers_version": "6.0", "model_type": "llama"}))
    assert model_fingerprint(folder) == before
    (folder / "tokenizer.json").write_text('{"model": []}')
    other_tokenizer = model_fingerprint(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 5}))
    assert len({before, other_tokenizer, model_fingerprint(folder)}) == 3


def test_a_file_cut_between_two_is_another_model(folder: Path) -> None:
    before = model_fingerprint(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:MIB])
    (folder / "model2.safetensors").write_bytes(whole[MIB:])
    assert model_fingerprint(folder) != before


def test_what_did_not_change_is_not_read_again_and_what_was_touched_is(folder: Path, hashed: list[str]) -> None:
    first = model_fingerprint(folder)
    assert hashed == ["model.safetensors", "tokenizer.json"]
    assert model_fingerprint(folder) == first
    assert len(hashed) == 2
    (folder / "model.safetensors").touch()
    assert model_fingerprint(folder) == first
    assert hashed[2:] == ["model.safetensors"]


def test_a_file_put_in_the_place_of_another_is_read(folder: Path, hashed: list[str], tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    first, stat = model_fingerprint(folder), weights.stat()
    shutil.copy2(weights, tmp_path / "new")
    change(tmp_path / "new", MIB, 1)
    os.utime(tmp_path / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "new").rename(weights)
    assert model_fingerprint(folder) != first


def test_a_file_that_has_just_been_written_is_not_kept(
    folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 3600 * 10**9)
    first = model_fingerprint(folder)
    assert model_fingerprint(folder) == first
    assert len(hashed) == 4


def test_lock_files_do_not_pile_up(folder: Path, cache: Path) -> None:
    for number in range(100):
        (folder / f"part-{number}.safetensors").write_bytes(b"x")
    model_fingerprint(folder)
    assert len(list(cache.glob("*.json"))) == 102
    assert len(list(cache.glob("*.lock"))) <= 16


@pytest.mark.parametrize("content", [b"", b"{}", b'{"state": 1, "digest": "x"}', b"\xff\xfe", b'[["\xff"'])
def test_a_damaged_cache_is_no_cache(folder: Path, cache: Path, hashed: list[str], content: bytes) -> None:
    first = model_fingerprint(folder)
    for entry in cache.glob("*.json"):
        entry.write_bytes(content)
    assert model_fingerprint(folder) == first
    assert len(hashed) == 4
    assert not [p for p in cache.iterdir() if p.suffix not in (".json", ".lock")]


def test_a_cache_that_cannot_be_written_costs_time_only(
    folder: Path, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "file"))
    assert model_fingerprint(folder) == model_fingerprint(folder)
    assert len(hashed) == 4


def test_ranks_that_start_together_read_each_file_once(folder: Path, hashed: list[str]) -> None:
    together = threading.Barrier(4)
    found: list[str] = []

    def start() -> None:
        together.wait(60)
        found.append(model_fingerprint(folder))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(hashed) == 2


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1])
def test_files_of_any_size_have_a_digest(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(bytes(size))
    assert len(model_fingerprint(folder)) == 32
