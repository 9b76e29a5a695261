"""Tests of the list of a checkpoint's tensors: which files have them, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from splitserve.core.errors import UnsupportedModelError
from splitserve.engine.file_checks import safetensors_files
from splitserve.engine.fit import tensor_files


def test_a_whole_file_is_read_alone(tmp_path: Path):
    for name in ("model", "model_old"):
        save_file({"a": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    assert tensor_files(tmp_path) == {"a": "model.safetensors"}


def test_a_whole_file_is_read_instead_of_the_files_of_an_index(tmp_path: Path):
    """As transformers does, which loads the models of one rank: all ranks must have the same weights."""
    for name in ("model", "model-1"):
        save_file({"a": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert tensor_files(tmp_path) == {"a": "model.safetensors"}
    (tmp_path / "model-1.safetensors").unlink()
    assert safetensors_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_without_a_whole_file_all_files_are_read(tmp_path: Path):
    for name in "ab":
        save_file({name: np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    assert tensor_files(tmp_path) == {"a": "a.safetensors", "b": "b.safetensors"}
    assert tensor_files(tmp_path / "absent") == {}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 1}'])
def test_a_damaged_index_is_rejected_with_its_name(content: str, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"index\.json cannot be read.*Fetch the model again"):
        tensor_files(tmp_path)


def test_a_damaged_file_is_rejected_with_its_name(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors is no safetensors file"):
        tensor_files(tmp_path)
