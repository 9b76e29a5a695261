"""The real model over three ranks: nine query heads and three KV heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from splitserve.engine.sources import resolve_model
from support.rank_world import RankCase, RankProcesses, RankWork, on_one_rank


@pytest.mark.soak
@pytest.mark.parametrize(("tp_size", "pp_size", "pp_layers"), [(3, 1, ()), (1, 3, (7, 12, 11))])
def test_smollm2_over_three_ranks_says_what_it_says_on_one(
    tp_size: int, pp_size: int, pp_layers: tuple[int, ...], tmp_path: Path
) -> None:
    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ("The capital of France is", "def fibonacci(n):", "Once upon a time, " * 8)
    work = RankWork(prompts=tuple(tuple(tokenizer(text)["input_ids"]) for text in texts), num_new=24, chunk=32)
    expected = on_one_rank(folder, work)
    with RankProcesses(3) as started:
        case = RankCase(folder=str(folder), tp_size=tp_size, pp_size=pp_size, pp_layers=pp_layers, work=work)
        outcomes = started.run(case, tmp_path / "ranks")
    assert [o.error for o in outcomes] == ["", "", ""]
    driver = outcomes[0] if pp_size == 1 else outcomes[-1]
    assert driver.tokens == expected.tokens
    for ours, theirs in zip(driver.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
    # float32, without the embedding a second time for the head that is tied to it.
    assert sum(o.bytes_read for o in outcomes) < 4 * (expected.num_parameters + 2 * 49152 * 576)
