"""Tests of the checks of a model's files: each damaged file is rejected with its name, what is wrong and the remedy."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from splitserve import cli
from splitserve.core.errors import USAGE_EXIT_CODE, UnsupportedModelError
from splitserve.engine import file_checks
from splitserve.engine.file_checks import check_folder, check_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").touch()
    save_file({"a": np.zeros(100, np.float32), "b": np.zeros(3, np.int8)}, path / "model.safetensors")
    return path


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:count])


def cut_weights(folder: Path) -> None:
    cut(folder / "model.safetensors", 300)


def cut_header(folder: Path) -> None:
    cut(folder / "model.safetensors", 30)


def extend_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"0")


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def other_format(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04 is a zip archive")


def damaged_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 9) + b'{"a": {}}')


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def no_second_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text("{")


def config_of(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(content)

    return write


DAMAGES = [
    (cut_weights, "model.safetensors has 300 bytes, its header requires 531. Copy it again."),
    (extend_weights, "model.safetensors has 532 bytes, its header requires 531. Copy it again."),
    (cut_header, "model.safetensors has 30 bytes, less than its header of 120. Copy it again."),
    (empty_weights, "model.safetensors is not a safetensors file. Copy it again."),
    (other_format, "model.safetensors is not a safetensors file. Copy it again."),
    (damaged_header, "model.safetensors has a damaged header: 'data_offsets'. Copy it again."),
    (pointer, "model.safetensors is a pointer of Git LFS, without weights. Run `git lfs pull` in its folder."),
    (no_second_file, "model-2.safetensors cannot be read: [Errno 2] No such file or directory"),
    (broken_index, "model.safetensors.index.json cannot be read: JSONDecodeError"),
    (config_of('{\n"model_type": }'), "config.json is not valid JSON: Expecting value: line 2 column 15 (char 16)."),
    (config_of("[]"), "config.json is not a JSON object. Copy it again."),
    (config_of('{"model_type": ["llama"]}'), "config.json: model_type is ['llama'], not a name. Copy it again."),
    (config_of('{"model_type": "foo"}'), "has no model_type 'foo'. Update transformers if a newer version has it"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
@pytest.mark.parametrize("command", ["up", "serve"])
def test_no_process_starts_with_a_damaged_file(
    command: str,
    damage: Callable[[Path], None],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: object, **options: object) -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr("splitserve.deploy.up.run_cluster_up", fail)
    monkeypatch.setattr("uvloop.run", fail)
    damage(folder)
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(folder), "--port", "0"])
    assert end.value.code == USAGE_EXIT_CODE
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_whole_files_pass_and_others_than_those_of_the_index_are_not_read(folder: Path) -> None:
    check_folder(folder)
    (folder / "consolidated.safetensors").touch()
    check_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    check_folder(folder)


def test_a_model_type_that_the_program_added_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    (folder / "config.json").write_text('{"model_type": "foo"}')
    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "foo", transformers.PretrainedConfig)
    check_folder(folder)


def test_the_list_of_transformers_is_found_without_its_import(folder: Path) -> None:
    assert file_checks._is_listed("llama")
    assert not file_checks._is_listed("foo")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["one", "two"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("lists", [[1, 2], [3, 4]])
    writer.add_custom_alignment(64)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("norm", np.ones(33, np.float32))
    writer.add_tensor("matrix", gguf.quantize(np.ones((4, 32), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_each_length_of_a_gguf_file_without_all_tensors_is_cut_off(file: Path) -> None:
    check_gguf(file)
    whole = file.read_bytes()
    last = max(tensor.data_offset + tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
    for count in range(4, last):
        file.write_bytes(whole[:count])
        with pytest.raises(UnsupportedModelError, match=r"model\.gguf is cut off: .* Copy it again"):
            check_gguf(file)
    file.write_bytes(whole[: last - 1])
    with pytest.raises(UnsupportedModelError, match=rf"requires {last} bytes, the file has {last - 1}\."):
        check_gguf(file)
    file.write_bytes(whole[:last])
    check_gguf(file)


@pytest.mark.parametrize("content", [b"", b"GG", b"this is not a model"])
def test_a_file_without_the_magic_is_not_a_gguf_file(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf is not a GGUF file. Check the path"):
        check_gguf(file)


@pytest.mark.parametrize("content", [struct.pack("<IQQ", 9, 1, 1), struct.pack("<IQQQcI", 3, 1, 1, 1, b"a", 99)])
def test_a_gguf_of_another_version_or_type_is_left_to_the_conversion(content: bytes, file: Path) -> None:
    file.write_bytes(b"GGUF" + content)
    check_gguf(file)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_of_several_gguf_files_of_a_model_is_rejected_with_the_command_that_merges_them(
    count: int, tmp_path: Path
) -> None:
    path = tmp_path / "model-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if count < 2:
        check_gguf(path)
        return
    with pytest.raises(UnsupportedModelError, match=r"of-00003\.gguf is one of the 3 files .*llama-gguf-split --merge"):
        check_gguf(path)
