"""Rank processes and models that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.rank_world import RankProcesses, save_random_model

NUM_RANKS = 4


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(NUM_RANKS) as started:
        yield started


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model with random weights, by its name in the module's CONFIGS."""
    root = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        path = root / name
        if not path.exists():
            save_random_model(request.module.CONFIGS[name](), path)
        return path

    return made
