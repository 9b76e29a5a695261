"""Prompts of real text for the real model, and the template that workers fork from."""

import argparse
import inspect
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from splitserve.engine.sources import resolve_model
from splitserve.process.template import TemplateProcess
from support.deployment import MODEL
from support.reference import LENGTHS
from support.worker_template import forked_workers, shared_template


@pytest.fixture(scope="session")
def worker_template() -> Iterator[TemplateProcess | None]:
    with shared_template() as template:
        yield template


@pytest.fixture(scope="module", autouse=True)
def workers_fork(worker_template: TemplateProcess | None) -> Iterator[None]:
    with forked_workers(worker_template):
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model(MODEL) / "tokenizer.json"))


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[list[int]]:
    """Twenty pieces of the same long text, none a prefix of another, of the lengths that matter."""
    ids = tokenizer.encode(inspect.getsource(argparse)).ids
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]
