"""The engine on a GPU: attention by FlashInfer and torch, recorded decode steps, against the same model on the CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from splitserve.core.batch import RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.attention.base import AttentionParams, PagedBatch
from splitserve.engine.attention.flashinfer import FlashInferBackend
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.build import BuiltEngine, engine_over
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LayerShape
from splitserve.tools.bench.gpu import GpuSizes, measure_gpu, random_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is missing: pip install 'splitserve[cuda]'"
)

GREEDY = ResolvedSampling(temperature=0.0)
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
CACHE = CacheConfig(page_size=16, max_total_tokens=1024)


@needs_flashinfer
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("num_heads", [2, 6, 16])
def test_flashinfer_equals_torch_over_prompts_and_decodes(
    dtype: str, window: int | None, softcap: float | None, num_heads: int
) -> None:
    import flashinfer

    device = torch.device("cuda:0")
    layout = layout_for([LayerShape(0, 2, 128, 128, window)], dtype, page_size=16, num_pages=64)
    pools = [KVPool(layout, device) for _ in range(2)]
    backends = (FlashInferBackend(pools[0], flashinfer), TorchSdpaBackend(pools[1]))
    rng = np.random.default_rng(0)
    pages = rng.permutation(64).reshape(4, 16)
    starts = np.zeros(4, np.int64)
    for lengths in ([100, 1, 17, 33], [1, 60, 1, 2], [1, 1, 1, 1], [1, 1, 1, 1]):
        new = np.array(lengths)
        used = tuple(pages[r, : -(-(int(starts[r]) + n) // 16)] for r, n in enumerate(lengths))
        batch = PagedBatch(starts.copy(), new, used, 16)
        kind = {"dtype": getattr(torch, dtype), "device": device}
        q, k, v = (torch.randn(int(new.sum()), heads, 128, **kind) for heads in (num_heads, 2, 2))
        found, expected = (b.plan(batch).forward(0, q, k, v, AttentionParams(0.09, window, softcap)) for b in backends)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        starts += new


@needs_flashinfer
def test_in_fixed_order_a_decode_step_has_the_same_bits_in_any_batch() -> None:
    import flashinfer

    device = torch.device("cuda:0")
    layout = layout_for([LayerShape(0, 2, 128, 128, None)], "bfloat16", page_size=16, num_pages=1024)
    pool = KVPool(layout, device)
    for tensor in (*pool.keys.values(), *pool.values.values()):
        tensor.normal_()
    backend = FlashInferBackend(pool, flashinfer, in_fixed_order=True)
    contexts = np.array([7000, 40, 3000])
    pages = tuple(np.arange(320 * r, 320 * r + -(-(int(n) + 1) // 16)) % 1024 for r, n in enumerate(contexts))
    rows = {heads: torch.randn(3, heads, 128, device=device).bfloat16() for heads in (8, 2)}

    def decode(of: slice) -> torch.Tensor:
        batch = PagedBatch(contexts[of], np.ones(len(contexts[of]), np.int64), pages[of], 16)
        return backend.plan(batch).forward(0, *(rows[heads][of] for heads in (8, 2, 2)), AttentionParams(0.09, None))

    together = decode(slice(0, 3))
    for r in range(3):
        assert torch.equal(together[r : r + 1], decode(slice(r, r + 1)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing: pip install triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_means_in_fixed_order_are_torchs_and_the_same_in_any_batch(dtype: torch.dtype) -> None:
    from splitserve.engine import fixed_order

    a, b, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((300, 1000), (1000, 520), (520,)))
    exact = a.double() @ b.double()
    torch.testing.assert_close(fixed_order.mm(a, b).double(), exact, atol=0.3, rtol=0.02)
    torch.testing.assert_close(fixed_order.addmm(bias, a, b).double(), exact + bias.double(), atol=0.3, rtol=0.02)
    for rows in (slice(0, 1), slice(17, 40), slice(0, 299)):
        assert torch.equal(fixed_order.mm(a, b)[rows], fixed_order.mm(a[rows], b))
        assert torch.equal(fixed_order.mean(a, [-1])[rows], fixed_order.mean(a[rows], [-1]))


@needs_flashinfer
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_heads", [4, 16, 128])
def test_flashinfer_equals_torch_over_latents(dtype: str, num_heads: int) -> None:
    import flashinfer

    device = torch.device("cuda:0")
    layout = layout_for([LayerShape(0, 1, 576, 512, None, is_latent=True)], dtype, page_size=16, num_pages=64)
    backends = (FlashInferBackend(KVPool(layout, device), flashinfer), TorchSdpaBackend(KVPool(layout, device)))
    fixed = backends[0].fixed_decode(4, 16)
    pages = np.random.default_rng(0).permutation(64).reshape(4, 16)
    starts = np.zeros(4, np.int64)
    params = AttentionParams(192**-0.5, is_latent=True)
    for lengths in ([100, 1, 17, 33], [1, 60, 1, 2], [1, 1, 1, 1], [1, 1, 1, 1]):
        new = np.array(lengths)
        used = tuple(pages[r, : -(-(int(starts[r]) + n) // 16)] for r, n in enumerate(lengths))
        batch = PagedBatch(starts.copy(), new, used, 16)
        kind = {"dtype": getattr(torch, dtype), "device": device}
        q, k = (torch.randn(int(new.sum()), heads, 576, **kind) for heads in (num_heads, 1))
        found, expected = (b.plan(batch).forward(0, q, k, k[..., :512], params) for b in backends)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        if (new == 1).all():
            fixed.fill(batch)
            torch.testing.assert_close(fixed.forward(0, q, k, k[..., :512], params), found)
        starts += new


def engine_with(dtype: torch.dtype, attention: str, graphs: int) -> BuiltEngine:
    torch.manual_seed(0)
    # On the CPU first, so that all have the same weights.
    loaded = random_model("tiny", SHAPE, torch.device("cpu"), dtype)
    device = torch.device("cuda:0")
    loaded.model.to(device)
    return engine_over(
        replace(loaded, device=device), ModelConfig(attention_backend=attention, cuda_graph_max_batch=graphs), CACHE
    )


def tokens_of(built: BuiltEngine, num_new: int = 20) -> list[list[int]]:
    """Greedy tokens of three prompts, decoded together; the second stops half-way."""
    table = np.arange(64, dtype=np.int32).reshape(4, 16)
    runner = built.runner(table)
    prompts = [list(range(1, 40)), [7], list(range(100, 117))]
    outputs: list[list[int]] = [[], [], []]
    for i in range(num_new):
        steps = []
        for row, prompt in enumerate(prompts):
            known = prompt + outputs[row]
            start = 0 if i == 0 else len(known) - 1
            if not (row == 1 and i > num_new // 2):
                steps.append(
                    RequestStep(str(row), row, known[start:], start, SampleSpec(GREEDY, len(known), known, ()))
                )
        results = runner.execute(StepPlan(tuple(steps))).requests
        for step, result in zip(steps, results, strict=True):
            assert result.token_id is not None
            outputs[step.row].append(result.token_id)
    return outputs


def test_a_gpu_draws_the_tokens_of_the_cpu_in_float32() -> None:
    torch.manual_seed(0)
    on_cpu = engine_over(random_model("tiny", SHAPE, torch.device("cpu"), torch.float32), ModelConfig(threads=1), CACHE)
    assert tokens_of(engine_with(torch.float32, "auto", 0)) == tokens_of(on_cpu)


@needs_flashinfer
def test_replayed_decode_steps_draw_the_tokens_of_plain_ones() -> None:
    plain = engine_with(torch.float16, "flashinfer", 0)
    recorded = engine_with(torch.float16, "flashinfer", 4)
    assert recorded.runner(np.zeros((1, 16), np.int32)).graphs is not None
    assert tokens_of(recorded) == tokens_of(plain)


def test_the_pool_lies_on_the_gpu_with_a_padding_page_behind_its_regions() -> None:
    built = engine_with(torch.float16, "torch", 0)
    assert built.pool.padding_page == built.layout.num_pages
    assert all(tensor.is_cuda for tensor in built.pool.keys.values())
    saved = built.pool.save([1, 2])
    built.pool.restore(saved, 0, [3, 4])
    assert all(torch.equal(t[3], t[1]) for t in built.pool.keys.values())


def test_the_bench_runs_whole_on_small_sizes() -> None:
    from rich.console import Console

    sizes = GpuSizes(shape=SHAPE, batch=4, context=64, prompt_tokens=128, num_bytes=8 << 20, matrix_size=512, repeats=3)
    model = ModelConfig(cuda_graph_max_batch=4)
    report = measure_gpu(model, sizes, torch.device("cuda:0"), Console(quiet=True))
    assert len(report.figures["figures"]) == 3
