"""The kernels' builds for float16: the results of torch in linear layers. Whole models: test_invariant_rows.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.kernels.weights import Kind, PackedLinear, Scratch

OWN = find_library(torch.float16)
pytestmark = pytest.mark.skipif(OWN is None, reason="no build for float16, or a CPU that does not convert it")


@pytest.fixture(params=["avx2f16", "this"])
def float16_library(request: pytest.FixtureRequest) -> KernelLibrary:
    if request.param == "this":
        assert OWN is not None
        return OWN
    spec = importlib.util.find_spec("splitserve._native.kernels_avx2f16")
    assert spec is not None
    assert spec.origin is not None
    return KernelLibrary(Path(spec.origin))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(("kind", "tolerance"), [(Kind.BF16, 1e-3), (Kind.INT8, 0.02), (Kind.W8A8, 0.04)])
@pytest.mark.parametrize("rows", [1, 2, 13, 485])
def test_a_packed_linear_is_a_linear(float16_library: KernelLibrary, kind: Kind, tolerance: float, rows: int) -> None:
    weight, x = random(100, 70), random(rows, 70, seed=1)
    found, expected = PackedLinear(float16_library, Scratch(), weight, None, kind)(x), x.float() @ weight.float().T
    assert found.dtype is torch.float16
    assert float((found.float() - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_numbers_beyond_float16_are_infinite(float16_library: KernelLibrary) -> None:
    x = torch.full((1, 4), 300.0).half()
    assert PackedLinear(float16_library, Scratch(), x)(x).isinf().all()
