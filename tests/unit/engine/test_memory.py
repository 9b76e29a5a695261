"""Memory is returned to the system, and an engine computes the same after it has resumed its memory."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from splitserve.core.batch import RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, EngineError, OptionError
from splitserve.core.machine import Sharing
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine import memory_saver, weights_source
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.memory import BuiltEngineMemory
from splitserve.engine.runner import ModelRunner
from splitserve.engine.whole_model import CONSTRUCTION
from support.draft_heads import add_mtp_layer, make_eagle3_head
from support.tiny_models import make_tiny_model

KV, WEIGHTS = MemoryTag.KV_CACHE, MemoryTag.WEIGHTS
PROMPT = tuple(range(2, 40))
GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)
POOL_BYTES = 64 << 20


class MemoryWorld:
    """A started engine over a tiny model, with one row of pages."""

    def __init__(self, folder: Path, *, shareable: bool = False, **model: Any) -> None:
        config = ModelConfig(model=str(folder), device="cpu", threads=1, **model)
        probe = build_engine(config, CacheConfig(max_total_tokens=16))
        num_tokens = POOL_BYTES // probe.layout.bytes_per_token
        probe.close()
        self.engine: BuiltEngine = build_engine(
            config, CacheConfig(max_total_tokens=num_tokens), pool_sharing=Sharing.ALWAYS if shareable else Sharing.NONE
        )
        self.memory = BuiltEngineMemory(self.engine)
        self._table = np.arange(8, dtype=np.int32)[None]
        self.runner: ModelRunner = self.engine.runner(self._table)

    def tokens(self, num_tokens: int = 8) -> list[int]:
        """Return the greedy continuation of the prompt, computed from nothing."""
        ids, output, start = list(PROMPT), list[int](), 0
        for _ in range(num_tokens):
            spec = SampleSpec(GREEDY, len(PROMPT) + len(output), PROMPT, output)
            step = RequestStep(rid="r", row=0, start=start, token_ids=tuple(ids[start:]), sample=spec)
            (result,) = self.runner.execute(StepPlan((step,))).requests
            assert result.token_id is not None, result.error
            start = len(ids)
            ids.append(result.token_id)
            output.append(result.token_id)
        return output

    def fill_pool(self) -> None:
        for part in (*self.engine.pool.keys.values(), *self.engine.pool.values.values()):
            part.fill_(1.0)

    def maps_weights(self) -> bool:
        """Return whether a file of this test's cache of weights is mapped."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(".weights" in line and os.environ["SPLITSERVE_CACHE"] in line for line in lines)


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "old", dtype=torch.bfloat16)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return the model with other weights."""
    return make_tiny_model("llama", tmp_path / "new", seed=1, dtype=torch.bfloat16)


@pytest.fixture
def shared_file(other: Path) -> Iterator[str]:
    """Return the name of a file in shared memory with the other weights."""
    name = f"splitserve-test-{os.getpid()}.safetensors"
    path = weights_source.SHARED_MEMORY / name
    path.write_bytes((other / "model.safetensors").read_bytes())
    yield name
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("shareable", [False, True], ids=["private", "shareable"])
def test_the_pool_is_returned_to_the_system_and_outputs_stay(folder: Path, shareable: bool) -> None:
    world = MemoryWorld(folder, shareable=shareable)
    before = world.tokens()
    world.fill_pool()
    full = resident()
    world.memory.release([KV])
    assert full - resident() >= 0.8 * POOL_BYTES
    assert world.memory.released == {KV}
    world.memory.resume([KV])
    assert not world.engine.pool.keys[0].any(), "it reads as zeros"
    assert world.tokens() == before


def test_a_peer_that_maps_the_pool_does_not_keep_it(folder: Path) -> None:
    world = MemoryWorld(folder, shareable=True)
    world.fill_pool()
    fd = world.engine.regions[0].fd
    assert os.fstat(fd).st_blocks * 512 >= POOL_BYTES * 0.9
    world.memory.release([KV])
    assert os.fstat(fd).st_blocks * 512 < POOL_BYTES * 0.1


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "private"])
def test_weights_are_dropped_and_loaded_again(folder: Path, share: bool) -> None:
    world = MemoryWorld(folder, share_weights=share)
    before, fingerprint = world.tokens(), world.memory.fingerprint
    assert world.maps_weights() == share
    world.memory.release([WEIGHTS])
    assert not world.maps_weights()
    with pytest.raises(EngineError, match="resume_memory_occupation"):
        world.tokens(1)
    # A second order is a no-op.
    world.memory.release([WEIGHTS])
    world.memory.resume([WEIGHTS, KV])
    assert world.maps_weights() == share
    assert world.tokens() == before
    assert world.memory.fingerprint == fingerprint


@pytest.fixture
def default_dtype() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "mixtral"])
def test_kernels_do_not_depend_on_the_default_dtype(name: str, tmp_path: Path) -> None:
    # Transformers changes it for all threads while it constructs a model.
    world = MemoryWorld(make_tiny_model(name, tmp_path / name, dtype=torch.bfloat16))
    before = world.tokens()
    torch.set_default_dtype(torch.bfloat16)
    assert world.tokens() == before


def is_constructing() -> bool:
    """Return whether CONSTRUCTION is held."""

    def is_free() -> bool:
        if is_acquired := CONSTRUCTION.acquire(blocking=False):
            CONSTRUCTION.release()
        return is_acquired

    # It is reentrant, so the thread that holds it could acquire it.
    with ThreadPoolExecutor(1) as thread:
        return not thread.submit(is_free).result()


def test_a_step_waits_while_a_model_is_constructed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = MemoryWorld(folder)
    changed, computed = list[bool](), list[bool]()
    change, body = torch.set_default_dtype, world.runner._body

    def set_default_dtype(dtype: torch.dtype) -> None:
        changed.append(is_constructing())
        change(dtype)

    def compute(*args: Any) -> Any:
        computed.append(is_constructing())
        return body(*args)

    monkeypatch.setattr(torch, "set_default_dtype", set_default_dtype)
    monkeypatch.setattr(world.runner, "_body", compute)
    world.memory.load(WeightsSource(str(folder)))
    world.tokens(1)
    assert changed
    assert all(changed)
    assert computed == [True]


def test_a_step_runs_while_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = MemoryWorld(folder, share_weights=False)
    before, computed = world.tokens(1), list[list[int]]()
    read = modeling_utils.safe_open

    def safe_open(*args: Any, **options: Any) -> Any:
        # A step in another thread would wait for this one without end.
        assert not is_constructing()
        with ThreadPoolExecutor(1) as thread:
            computed.append(thread.submit(world.tokens, 1).result())
        return read(*args, **options)

    monkeypatch.setattr(modeling_utils, "safe_open", safe_open)
    world.memory.load(WeightsSource(str(folder)))
    assert computed == [before]


def test_a_model_may_construct_another_one(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with modeling_utils.local_torch_dtype(torch.bfloat16):
        assert AutoModelForCausalLM.from_config(config).dtype == torch.bfloat16
        assert is_constructing()
    assert not is_constructing()


def test_requests_compute_the_same_while_weights_are_loaded(folder: Path) -> None:
    world = MemoryWorld(folder)
    before, has_loaded, found = world.tokens(), threading.Event(), list[list[int]]()

    def compute() -> None:
        while not has_loaded.is_set():
            found.append(world.tokens())

    with ThreadPoolExecutor(1) as thread:
        computing = thread.submit(compute)
        try:
            for _ in range(3):
                world.memory.load(WeightsSource(str(folder)))
        finally:
            has_loaded.set()
        computing.result()
    assert found
    assert all(tokens == before for tokens in found)


def test_packed_experts_are_loaded_again(tmp_path: Path) -> None:
    # Their layers contain addresses of their weights.
    world = MemoryWorld(make_tiny_model("mixtral", tmp_path / "moe", dtype=torch.bfloat16))
    before = world.tokens()
    world.memory.release([WEIGHTS])
    world.memory.resume([WEIGHTS])
    assert world.tokens() == before


def test_an_update_computes_what_a_new_worker_does(folder: Path, other: Path) -> None:
    fresh = MemoryWorld(other)
    expected, fingerprint = fresh.tokens(), fresh.memory.fingerprint
    world = MemoryWorld(folder)
    old = world.tokens()
    assert old != expected
    world.memory.load(WeightsSource(str(other)))
    assert world.tokens() == old
    world.memory.use()
    world.memory.undo()
    assert world.tokens() == old
    world.memory.use()
    world.memory.confirm()
    assert world.tokens() == expected
    assert world.memory.fingerprint == fingerprint
    # A later resume loads the new weights.
    world.memory.release([WEIGHTS, KV])
    world.memory.resume([WEIGHTS, KV])
    assert world.tokens() == expected


def test_an_update_from_shared_memory_computes_the_same(folder: Path, other: Path, shared_file: str) -> None:
    fresh = MemoryWorld(other)
    world = MemoryWorld(folder)
    old = world.tokens()
    for _ in range(2):
        world.memory.load(WeightsSource(shared_file, is_shared_memory=True))
        world.memory.use()
        world.memory.confirm()
    assert world.tokens() == fresh.tokens()
    # The trainer may write its next weights into the same file, or remove it.
    (weights_source.SHARED_MEMORY / shared_file).write_bytes(b"next weights")
    assert world.tokens() == fresh.tokens()
    world.memory.release([WEIGHTS])
    world.memory.resume([WEIGHTS])
    assert world.tokens() == fresh.tokens()
    # Peers with the same weights from disk may exchange KV with it.
    assert world.memory.fingerprint == fresh.memory.fingerprint
    world.memory.load(WeightsSource(str(folder)))
    world.memory.use()
    world.memory.close()
    assert world.tokens() == old


def test_a_checkpoint_that_changed_on_disk_has_another_fingerprint(folder: Path, other: Path) -> None:
    world = MemoryWorld(folder)
    fingerprint = world.memory.fingerprint
    world.memory.release([WEIGHTS])
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    world.memory.resume([WEIGHTS])
    assert world.memory.fingerprint != fingerprint


def test_weights_of_another_shape_are_rejected_and_the_old_ones_stay(folder: Path, tmp_path: Path) -> None:
    world = MemoryWorld(folder)
    before = world.tokens()
    misfit = make_tiny_model("gemma2", tmp_path / "misfit", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="it differs in the"):
        world.memory.load(WeightsSource(str(misfit)))
    with pytest.raises(EngineError, match="begin it anew"):
        world.memory.use()
    assert world.tokens() == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [("../etc/passwd", "without folders"), ("no-such-file", "there is no file"), ("", "without folders")],
)
def test_a_wrong_name_in_shared_memory_is_rejected(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        weights_source.folder_around(name, folder)


def test_an_incomplete_file_in_shared_memory_is_rejected(folder: Path, shared_file: str) -> None:
    path = weights_source.SHARED_MEMORY / shared_file
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: absent"):
        weights_source.folder_around(shared_file, folder)
    path.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        weights_source.folder_around(shared_file, folder)


def with_mtp_layer(folder: Path, seed: int) -> Path:
    return add_mtp_layer(
        make_tiny_model("deepseek_v3", folder, seed=seed), folder.with_name(f"scratch{seed}"), num_steps=1
    )


class DraftWorld:
    """A started engine with a draft of this kind."""

    def __init__(self, kind: str, dtype: str, model: Path, draft: Path | None) -> None:
        config = ModelConfig(model=str(model), device="cpu", threads=1, dtype=dtype)
        head = SpeculativeAlgorithm(kind) if kind != "draft" else None
        name = None if draft is None else str(draft)
        engine = build_engine(config, CacheConfig(max_total_tokens=256), draft_model=name, draft_head=head)
        self.memory = BuiltEngineMemory(engine)
        table = np.arange(8, dtype=np.int32)[None]
        self._runner = engine.drafting_runner(table)

    def outputs(self) -> tuple[int, list[int]]:
        """Return the token after the prompt, and proposals after it."""
        spec = SampleSpec(GREEDY, len(PROMPT), PROMPT, [])
        step = RequestStep(rid="r", row=0, start=0, token_ids=PROMPT, sample=spec)
        (result,) = self._runner.execute(StepPlan((step,))).requests
        assert result.token_id is not None, result.error
        spec = SampleSpec(GREEDY, len(PROMPT) + 1, PROMPT, [result.token_id])
        state = result.draft_state
        step = RequestStep("r", 0, (result.token_id,), len(PROMPT), spec, draft_state=state)
        return result.token_id, self._runner.propose([step], [3])[0]


# In bfloat16 our kernels compute several layers in one call, so captured layers divide them.
@pytest.mark.parametrize(
    ("kind", "dtype"), [("draft", "float32"), ("eagle3", "float32"), ("eagle3", "bfloat16"), ("mtp", "float32")]
)
def test_a_draft_follows_the_new_weights(kind: str, dtype: str, tmp_path: Path) -> None:
    draft: Path | None = None
    if kind == "mtp":
        old, new = (with_mtp_layer(tmp_path / str(seed), seed) for seed in range(2))
    else:
        old, new = (make_tiny_model("llama", tmp_path / str(seed), seed=seed) for seed in range(2))
        draft = old if kind == "draft" else make_eagle3_head(old, tmp_path / "head", num_steps=1)
    fresh = DraftWorld(kind, dtype, new, draft)
    expected, fingerprint = fresh.outputs(), fresh.memory.fingerprint
    world = DraftWorld(kind, dtype, old, draft)
    before = world.outputs()
    assert before != expected
    world.memory.release([WEIGHTS, KV])
    with pytest.raises(EngineError, match="released"):
        world.outputs()
    world.memory.resume([WEIGHTS, KV])
    assert world.outputs() == before
    world.memory.load(WeightsSource(str(new)))
    assert world.outputs() == before
    world.memory.use()
    world.memory.undo()
    assert world.outputs() == before
    world.memory.use()
    world.memory.confirm()
    assert world.outputs() == expected
    assert world.memory.fingerprint == fingerprint
    world.memory.release([WEIGHTS])
    world.memory.resume([WEIGHTS])
    assert world.outputs() == expected


def test_quantized_weights_do_not_replace_others(folder: Path, other: Path) -> None:
    world = MemoryWorld(folder)
    before = world.tokens()
    config = json.loads((other / "config.json").read_text())
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    with pytest.raises(ConfigError, match=r"quantized weights \(gptq with 4 bits\), and this worker has"):
        world.memory.load(WeightsSource(str(other)))
    assert not world.memory.has_next
    assert world.tokens() == before


def test_a_quantized_gguf_file_is_rejected_before_it_is_prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = MemoryWorld(folder)
    monkeypatch.setattr("splitserve.engine.sources.resolve_model", lambda model: pytest.fail("it was prepared"))
    with pytest.raises(ConfigError, match=r"quantized weights \(gguf\), and this worker has"):
        world.memory.load(WeightsSource("smollm2-q4"))


class FakeSaver:
    """torch_memory_saver, as far as it is used."""

    def __init__(self) -> None:
        self.hook_mode: str | None = None
        self.calls: list[tuple[str, str]] = []

    def region(self, *, tag: str, enable_cpu_backup: bool) -> contextlib.AbstractContextManager[None]:
        assert not enable_cpu_backup
        self.calls.append(("region", tag))
        return contextlib.nullcontext()

    def pause(self, tag: str) -> None:
        self.calls.append(("pause", tag))

    def resume(self, tag: str) -> None:
        raise RuntimeError("CUDA out of memory")


def test_the_library_for_gpus_is_called_with_the_tag_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="--enable-memory-saver needs torch_memory_saver"):
        memory_saver.region()
    saver = FakeSaver()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace(torch_memory_saver=saver))  # type: ignore[misc]
    with memory_saver.region():
        pass
    memory_saver.pause()
    assert saver.hook_mode == "torch"
    assert saver.calls == [("region", "kv_cache"), ("pause", "kv_cache")]
    with pytest.raises(ConfigError, match=r"out of memory.*Free memory of the device"):
        memory_saver.resume()
