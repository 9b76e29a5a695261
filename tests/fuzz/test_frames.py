"""Mutated frames and random bytes at every internal port: nothing crashes, hangs or grows, and a real peer is served.

Each target has a corpus (tests/corpus/frames/TARGET): inputs that are replayed in every run. A long run
(`make soak`) writes what fails into it.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .frames import TARGETS, Target, mutations

CORPUS = Path(__file__).parents[1] / "corpus" / "frames"
FEW, MANY = 60, 10_000
# hypothesis remembers every input of one run (73 MB for 10,000), which would hide a leak of ours.
BATCH = 500
ENTRIES = sorted(CORPUS.glob("*/*.bin"))


@pytest.fixture
def target(request: pytest.FixtureRequest):
    # Thousands of lines about what was dropped would bury a failure.
    logging.disable(logging.ERROR)
    try:
        with TARGETS[request.param]() as made:
            yield made
            made.check()
            made.check_nothing_is_left()
    finally:
        logging.disable(logging.NOTSET)


def attack_with_many(target: Target, count: int, *, keep: bool = False) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not keep,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        attack = data.draw(mutations(target.samples))
        try:
            target.attack(attack)
        except Exception:
            if keep:
                folder = CORPUS / target.name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{hashlib.blake2b(attack, digest_size=8).hexdigest()}.bin").write_bytes(attack)
            raise

    run()


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_mutated_frames_harm_nothing(target: Target) -> None:
    attack_with_many(target, FEW)


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_many_mutated_frames_harm_nothing(target: Target) -> None:
    for _ in range(MANY // BATCH):
        attack_with_many(target, BATCH, keep=True)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_the_corpus_harms_nothing(target: Target) -> None:
    entries = [entry for entry in ENTRIES if entry.parent.name == target.name]
    assert entries
    for entry in entries:
        target.attack(entry.read_bytes())


def test_every_entry_of_the_corpus_belongs_to_a_target() -> None:
    assert {entry.parent.name for entry in ENTRIES} == set(TARGETS)
