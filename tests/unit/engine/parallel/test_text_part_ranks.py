"""The text model of a multimodal checkpoint over several ranks: tokens and logprobs are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.multimodal import save_multimodal
from support.rank_world import RankCase, RankProcesses, RankWork, on_one_rank

WORK = RankWork(prompts=((5,), tuple(range(3, 43)), (7, 250, 9)))


@pytest.mark.parametrize(
    ("kind", "text_kind", "tp_size", "pp_size"),
    [("gemma3", "gemma3_text", 2, 2), ("mistral3", "mistral", 2, 1), ("internvl", "qwen3_moe", 1, 2)],
)
def test_ranks_compute_what_one_rank_computes(
    kind: str, text_kind: str, tp_size: int, pp_size: int, processes: RankProcesses, tmp_path: Path
) -> None:
    save_multimodal(kind, text_kind, tmp_path / "model")
    case = RankCase(folder=str(tmp_path / "model"), tp_size=tp_size, pp_size=pp_size, work=WORK)
    outcomes, expected = processes.run(case, tmp_path / "ranks"), on_one_rank(tmp_path / "model", WORK)
    assert [o.error for o in outcomes] == [""] * case.num_ranks
    assert [o.bytes_read for o in outcomes] == [4 * o.num_parameters for o in outcomes]
    driver = outcomes[(pp_size - 1) * tp_size]
    assert driver.tokens == expected.tokens
    for ours, theirs in zip(driver.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-4)
