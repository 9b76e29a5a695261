"""Tiny models made once for all tests of the engine, and a hand-driven engine over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitserve.core.config import ModelConfig
from splitserve.engine.loader import LoadedModel, load_model
from support.tiny_models import TinyKind, make_tiny_model


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
