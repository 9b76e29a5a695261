"""`bench quantization`: the arithmetic of its report, and whole runs with tiny models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.engine.kernels.library import find_library
from splitserve.tools.bench.options import QuantizationBenchOptions
from splitserve.tools.bench.quantization import TextScore, bench_quantization, quantization_report
from support.quantized import SCHEMES, make_quantized
from support.tiny_models import make_tiny_model

needs_kernels = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")
QUIET = Console(quiet=True)


def run(model: Path, **settings: object) -> dict[str, dict[str, float]]:
    options = QuantizationBenchOptions(model=str(model), threads=1, **settings)
    figures = bench_quantization(options, QUIET).to_json()
    return {variant["name"].rpartition(", ")[2]: variant for variant in figures["variants"]}


def test_perplexity_agreement_and_deltas_of_two_scores() -> None:
    reference = TextScore("a", [math.log(0.5), math.log(0.25)], [1, 2], 0.001)
    other = TextScore("b", [math.log(0.25), math.log(0.25)], [1, 3], 0.001)
    report = quantization_report(QuantizationBenchOptions(model="m"), 3, [reference, other])
    assert report.figures["variants"][0]["perplexity"] == pytest.approx(8**0.5)
    assert report.figures["variants"][1]["greedy_agreement"] == 0.5
    assert report.figures["variants"][1]["mean_logprob_delta"] == pytest.approx(math.log(2) / 2)
    assert report.figures["variants"][1]["max_logprob_delta"] == pytest.approx(math.log(2))
    assert report.tables[0].rows[0][2] == "100.0%"


@needs_kernels
def test_a_model_is_compared_with_itself_in_8_bits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a short text of bytes")
    found = run(make_tiny_model("llama", tmp_path / "model"), text=text)
    assert list(found) == ["bfloat16", "int8", "w8a8"]
    assert found["bfloat16"]["greedy_agreement"] == 1.0
    assert found["bfloat16"]["max_logprob_delta"] == 0.0
    assert 0.0 < found["int8"]["mean_logprob_delta"] < found["w8a8"]["mean_logprob_delta"] < 1.0


@needs_kernels
def test_a_quantized_checkpoint_is_compared_with_its_own_weights_in_bfloat16(tmp_path: Path) -> None:
    make_quantized(SCHEMES["awq, groups of 64"], tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a short text of bytes")
    found = run(tmp_path, text=text)
    assert list(found) == ["bfloat16", "awq with 4 bits"]
    assert found["awq with 4 bits"]["mean_logprob_delta"] < 0.1


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--text .*absent"):
        run(tmp_path, text=tmp_path / "absent")
