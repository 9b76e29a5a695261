"""The folders with equal weights between which chaos changes a worker's model."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from splitserve.tools.chaos.run import weight_folders


def test_a_model_of_a_relative_path_has_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "links").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({}, model / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    folder, link = weight_folders("model", tmp_path / "links")
    assert folder != link
    assert all((path / "config.json").exists() and path.is_absolute() for path in (folder, link))
