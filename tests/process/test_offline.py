"""Engines with the real model: both forms return transformers' tokens, and the output is that of docs/offline.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import transformers

import splitserve
from splitserve import Engine, SamplingParams
from splitserve.engine.sources import resolve_model
from support.deployment import MODEL
from support.reference import greedy_reference

pytestmark = pytest.mark.process

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
PAGE = (Path(__file__).parents[2] / "docs" / "offline.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\s+```\n(.*?)```", PAGE, re.DOTALL)
FORMS = {"null": {}, "pair": {"prefill": 1, "decode": 1, "transfer_backend": "shm"}}


@pytest.fixture(scope="module")
def some_prompts(prompts) -> list[list[int]]:
    return prompts[4:16:6]


# The examples of the docs start engines of both forms.
@pytest.fixture(scope="module", params=[pytest.param("null", marks=pytest.mark.soak), "pair"])
def engine(request) -> Iterator[Engine]:
    before = set(psutil.Process().children(recursive=True))
    form = FORMS[request.param]
    with Engine(MODEL, dtype="float32", threads=1, max_total_tokens=8192, chunked_prefill_size=64, **form) as engine:
        yield engine
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture(scope="module")
def expected(some_prompts) -> list[list[int]]:
    torch.set_num_threads(1)
    folder = resolve_model(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [greedy_reference(model)(prompt, NUM_TOKENS) for prompt in some_prompts]


def test_greedy_output_equals_generate(engine, some_prompts, expected):
    outputs = engine.generate(some_prompts, GREEDY, logprobs=1)
    assert [list(o.token_ids) for o in outputs] == expected
    for prompt, output in zip(some_prompts, outputs, strict=True):
        assert output.prompt_tokens == len(prompt)
        assert [t.token_id for t in output.logprobs] == list(output.token_ids)
        assert all(t.top == ((t.token_id, t.logprob),) for t in output.logprobs)


def test_a_stream_is_the_same_piece_by_piece(engine, some_prompts, expected):
    chunks = list(engine.stream(some_prompts[0], GREEDY))
    assert len(chunks) > 1
    assert [t for c in chunks for t in c.token_ids] == expected[0]
    assert "".join(c.text for c in chunks) == chunks[-1].output.text


# The first one is below.
@pytest.mark.parametrize(("program", "shown"), EXAMPLES[1:])
def test_the_examples_of_the_docs_print_what_they_show(program, shown, capsys):
    # In this process, because a start of Python that loads the engine's modules takes seconds.
    exec(compile(program, "offline.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == shown


def test_an_example_is_a_program_that_ends():
    program, shown = EXAMPLES[0]
    env = {**os.environ, "PYTHONPATH": str(Path(splitserve.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3
