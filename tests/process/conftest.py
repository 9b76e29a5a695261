"""Prompts of real text for the real model. All workers fork."""

import argparse
import inspect

import pytest
from tokenizers import Tokenizer

from splitserve.engine.sources import resolve_model
from support.deployment import MODEL
from support.reference import LENGTHS


@pytest.fixture(scope="module", autouse=True)
def _all_workers_fork(workers_fork: None) -> None:
    pass


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model(MODEL) / "tokenizer.json"))


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[list[int]]:
    """Twenty pieces of the same long text, none a prefix of another, of the lengths that matter."""
    ids = tokenizer.encode(inspect.getsource(argparse)).ids
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]
