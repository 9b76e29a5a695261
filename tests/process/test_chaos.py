"""`splitserve chaos` on tiny models: no client loses anything by faults, changes of memory and draft heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitserve.tools.bench.options import ChaosOptions
from splitserve.tools.chaos.run import bench_chaos
from support.draft_heads import TaughtModel
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.process, pytest.mark.soak]


def run(model: Path, seed: int, *serve_options: str, num_workers: int = 2) -> dict[str, Any]:
    options = ChaosOptions(
        model=str(model),
        # In bfloat16, tokens of these models do not depend on their batch.
        dtype="bfloat16",
        seconds=40.0,
        streams=12,
        prefill=num_workers,
        decode=num_workers,
        seed=seed,
        serve_options=" ".join(serve_options),
    )
    report = bench_chaos(options, Console(quiet=True))
    assert not report.failed, report.remarks
    figures: dict[str, Any] = report.figures
    return figures


def test_memory_is_released_and_weights_are_updated_under_load(tmp_path: Path) -> None:
    # The seed's first faults.
    expected = {"prefill weights updated", "decode kv_cache and weights released"}
    figures = run(make_tiny_model("llama", tmp_path / "llama"), 14)
    assert expected <= figures["faults"].keys()
    # Bit for bit.
    assert figures["tolerance"] == 0.0


def test_requests_wait_for_the_only_worker_of_each_role(tmp_path: Path) -> None:
    figures = run(make_tiny_model("llama", tmp_path / "llama"), 5, num_workers=1)
    assert figures["retries"] + figures["migrations"] > 0


@pytest.mark.parametrize("name", ["taught_with_eagle3", "taught_with_mtp"])
def test_proposals_of_a_head_are_accepted_under_faults(name: str, request: pytest.FixtureRequest) -> None:
    taught: TaughtModel = request.getfixturevalue(name)
    figures = run(taught.model, 11, *taught.options, "--max-total-tokens", "1600", "--num-reserved-decode-tokens", "1")
    proposed, accepted = (figures[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted"))
    assert accepted > 0.1 * proposed > 0
