"""What a worker would only find out after its start is refused before any process starts."""

from __future__ import annotations

import inspect
import json
import os
import socket
import typing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file

from splitserve import cli
from splitserve.core.config import ModelConfig, WorkerConfig
from splitserve.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from splitserve.core.speculative import SpeculativeAlgorithm, SpeculativeConfig
from splitserve.worker import preflight
from splitserve.worker.preflight import check_preflight

LLAMA = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 4, "max_position_embeddings": 512}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    save_file({}, path / "model.safetensors")
    (path / "tokenizer.json").touch()
    return path


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as soon as a process would start."""

    def fail(*args: object, **options: object) -> int:
        raise AssertionError("a process was started")

    # Not the class: modules that the command imports first name it in their types.
    monkeypatch.setattr("subprocess.Popen.__init__", fail)
    monkeypatch.setattr("splitserve.deploy.up.run_cluster_up", fail)
    monkeypatch.setattr("uvloop.run", fail)


def as_up(folder: Path, words: list[str]) -> list[str]:
    return ["up", str(folder), *words]


def as_up_behind(folder: Path, words: list[str]) -> list[str]:
    return ["up", str(folder), "--", *words]


def as_serve(folder: Path, words: list[str]) -> list[str]:
    return ["serve", str(folder), "--port", "0", *words]


def as_cluster(folder: Path, words: list[str]) -> list[str]:
    file = folder.parent / "cluster.yaml"
    pools = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}
    file.write_text(json.dumps({"model": str(folder), "worker_args": words, "pools": pools}))
    return ["cluster", "up", str(file)]


LATE = [
    (["--quantization", "fp8"], "--quantization fp8: choose one of int8, w8a8"),
    (["--quantization", "int8", "--dtype", "float32"], "--dtype does not go together with --quantization"),
    (["--quantization", "int8", "--kernels", "torch"], "--kernels does not go together with --quantization"),
    (["--quantization", "int8", "--device", "cuda"], "--device does not go together with --quantization"),
    (["--header-timeout", "0"], "--header-timeout must be above 0 and finite, not 0"),
    (["--max-request-bytes", "0"], "--max-request-bytes must be above 0 and finite, not 0"),
    (["--max-messages", "-1"], "--max-messages must be above 0 and finite, not -1"),
    (["--transfer-timeout", "nan"], "--transfer-timeout must be above 0 and finite, not nan"),
    (["--device", "tpu"], "--device tpu: choose auto, cpu, cuda or cuda:N"),
    (["--context-length", "100000"], "has positions for 512 tokens; give 512 or less"),
    (["--context-length", "3"], "--context-length 3: too small for a chat request; give 128 or more"),
    (["--max-total-tokens", "5"], "--max-total-tokens 5: too small for one request; give 128 or more"),
    (["--kv-events-config", '{"publisher": "pigeon"}'], "there is no publisher 'pigeon'"),
    (["--kv-events-config", '{"topics": ""}'], "--kv-events-config"),
    (["--transfer-backend", "pigeon"], "--transfer-backend pigeon: choose one of tcp"),
    (["--transfer-option", "speed=1"], "has no option 'speed'"),
    (["--cpu-affinity", "a-b"], "--cpu-affinity a-b: "),
    (["--speculative-algorithm", "beam"], "--speculative-algorithm beam: choose one of ngram, draft"),
]


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("command", [as_up, as_up_behind, as_serve, as_cluster])
@pytest.mark.parametrize(("words", "message"), LATE)
def test_no_process_starts_with_a_wrong_option(
    words: list[str],
    message: str,
    command: Callable[[Path, list[str]], list[str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(command(folder, words))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert "end of its log" not in error


HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": 258, "hidden_size": 96}
DRAFTS: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    ("mtp", {}, {}, "has no layer for multi-token prediction"),
    ("mtp", {"num_nextn_predict_layers": 1}, {}, "has no model.layers.4.enorm.weight"),
    ("mtp", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, {}, "MTP layers of quant"),
    ("eagle3", {}, HEAD | {"architectures": ["LlamaForCausalLM"]}, "has the architecture LlamaForCausalLM"),
    ("eagle3", {}, HEAD | {"num_hidden_layers": 2}, "has 2 layers, which is not supported"),
    ("eagle3", {}, HEAD | {"fc_norm": True}, "has fc_norm set, which is not supported"),
    ("eagle3", {}, HEAD | {"vocab_size": 9}, "has a vocab_size of 9, and the served model one of 258"),
    ("eagle3", {}, HEAD | {"hidden_size": 8}, "has a hidden_size without embed_tokens of 8, and the served model one"),
    ("eagle3", {}, HEAD | {"target_hidden_size": 8}, "has a target_hidden_size of 8, and the served model one of 96"),
    ("draft", {}, {"vocab_size": 9}, "has a vocabulary of 9 tokens"),
]


VISION: dict[str, object] = {"vision_config": {}}
MULTIMODAL: list[tuple[dict[str, object], str]] = [
    ({"model_type": "llava", "text_config": {"model_type": "granite"}}, "llava with the text model granite"),
    ({"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "qwen2_5_vl"),
    ({"model_type": "paligemma", "architectures": ["X"], "text_config": {"model_type": "gemma"}}, "model gemma"),
]


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("command", [as_up, as_serve, as_cluster])
@pytest.mark.parametrize(("config", "message"), MULTIMODAL)
def test_no_process_starts_with_a_multimodal_model_that_is_not_served(
    config: dict[str, object],
    message: str,
    command: Callable[[Path, list[str]], list[str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "config.json").write_text(json.dumps(VISION | config))
    with pytest.raises(SystemExit) as end:
        cli.main(command(folder, []))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: Model {folder} is multimodal (vision_config in its config): ")
    assert f"{message}. The text model of gemma3, " in error


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava", "text_config": {"model_type": "llama"}, "architectures": ["X"]},
        {"model_type": "gemma3", "text_config": {}},
        {"model_type": "gemma3"},
        {"model_type": "phi4_multimodal", "architectures": ["Phi4MultimodalForCausalLM"]},
        {"model_type": "phi4_multimodal"},
        {"model_type": "llama", "architectures": ["LlamaModel"], "vision_config": None},
    ],
)
def test_a_multimodal_model_that_may_be_served_passes(config: dict[str, object], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(VISION | config))
    check_preflight(WorkerConfig(), folder)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("command", [as_up, as_serve, as_cluster])
@pytest.mark.parametrize(("algorithm", "served", "draft", "message"), DRAFTS)
def test_no_process_starts_with_a_proposer_that_does_not_fit_the_model(
    algorithm: str,
    served: dict[str, object],
    draft: dict[str, object],
    message: str,
    command: Callable[[Path, list[str]], list[str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 258, "hidden_size": 96} | served))
    save_file({"model.norm.weight": np.zeros(1)}, folder / "model.safetensors")
    words = ["--speculative-algorithm", algorithm]
    if draft:
        head = folder.parent / "head"
        head.mkdir()
        (head / "config.json").write_text(json.dumps(draft))
        save_file({"fc.weight": np.zeros(1)}, head / "model.safetensors")
        words += ["--speculative-draft-model", str(head)]
    with pytest.raises(SystemExit) as end:
        cli.main(command(folder, words))
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint_is_rejected_by_name(folder: Path) -> None:
    config = WorkerConfig(speculative=SpeculativeConfig(algorithm=SpeculativeAlgorithm.MTP))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors is no safetensors file"):
        check_preflight(config, folder)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-level", "loud"], "--log-level loud: choose one of debug"),
        (["--policy", "fastest"], "--policy fastest: choose one of round_robin"),
        (["--disaggregate-above", "0"], "--disaggregate-above must be at least 1"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"),
        (["--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere"], "--ssl-certfile /nowhere: No such file"),
        (["--cluster-token-file", "/nowhere"], "--cluster-token-file /nowhere: No such file"),
        (["--max-messages", "many"], "--max-messages: "),
        (["--rate-limit", "5"], "give --api-key-file, too"),
        (["--threads", "100000"], "--threads must be in [1, 1024], not 100000"),
        (["--decode-tp-size", "2"], "sizes that would do: 1, 3, 9"),
    ],
)
def test_up_checks_the_options_of_its_router_and_of_itself(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["up", str(folder), *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("value", ["-1", "nan", pytest.param("-inf", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["serve", "router", "up"])
def test_no_option_takes_a_number_without_meaning(
    name: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    annotations = inspect.signature(command.callback).parameters
    flags = [p.opts[0] for p in command.params if {int, float} & _types(annotations[p.name].annotation)]
    assert len(flags) > 20
    for flag in set(flags) - {"--fd"}:
        words = [name, *([str(folder)] if name != "router" else []), f"{flag}={value}"]
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n")) == (2, 1), (words, error)
        assert error.startswith(f"error: {flag}"), (words, error)


def _types(annotation: object) -> set[object]:
    kind = typing.get_args(annotation)[0]
    return {kind, *typing.get_args(kind)}


def test_up_needs_no_model_before_the_options_of_workers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """`up -- --speculative-algorithm ngram` took the option for the model."""
    seen = []
    monkeypatch.setattr("splitserve.engine.sources.resolve_model", lambda model: folder)
    monkeypatch.setattr("splitserve.deploy.up.run_cluster_up", lambda config: seen.append(config) or 0)
    with pytest.raises(SystemExit):
        cli.main(["up", "--", "--speculative-algorithm", "ngram"])
    [config] = seen
    assert config.model == "smollm2"
    assert "--speculative-algorithm ngram" in " ".join(config.worker_args)


def test_up_hands_each_process_its_options(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr("splitserve.deploy.up.run_cluster_up", lambda config: seen.append(config) or 0)
    keys = tmp_path / "keys"
    keys.write_text("k" * 32 + " client\n")
    words = ["--policy", "least_load", "--disaggregate-above", "64", "--api-key-file", str(keys), "--max-messages", "9"]
    words += ["--page-size", "8", "--max-running-requests", "3", "--router-max-running-requests", "5"]
    words += ["--max-failed-starts", "7", "--drain-timeout", "2", "--load-timeout", "11", "--port", "0"]
    with pytest.raises(SystemExit):
        cli.main(["up", str(folder), *words])
    [config] = seen
    router, worker = " ".join(config.router.args), " ".join(config.worker_args)
    assert config.keys.clients == str(keys)
    assert "--policy least_load" in router
    assert "--disaggregate-above 64" in router
    assert "--max-running-requests 5" in router
    assert "--page-size 8" in worker
    assert "--max-running-requests 3" in worker
    assert "--page-size" not in router
    assert "--policy" not in worker
    assert "--max-messages 9" in router
    assert "--max-messages 9" in worker
    assert (config.supervision.max_failed_starts, config.supervision.drain_timeout) == (7, 2.0)
    assert config.supervision.load_timeout == 11.0


def test_a_folder_without_tokenizer_is_refused_with_what_is_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer; copy tokenizer\.json"):
        check_preflight(WorkerConfig(model=ModelConfig(model="m")), folder)


def test_a_draft_model_that_is_not_there_is_refused(folder: Path) -> None:
    config = WorkerConfig(speculative=SpeculativeConfig(draft_model="/no/such/model"))
    with pytest.raises(ModelNotFoundError, match="/no/such/model"):
        check_preflight(config, folder)


def test_a_core_of_others_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(ConfigError, match="may not use core 7; it has"):
        check_preflight(WorkerConfig(model=ModelConfig(cpu_affinity="0,7")), folder)
    check_preflight(WorkerConfig(model=ModelConfig(cpu_affinity="0-1")), folder)


@pytest.mark.parametrize(
    ("device", "lack", "count", "message"),
    [
        ("cuda", "a CUDA device", 0, "--device cuda: needs a CUDA device; or give --device cpu"),
        ("cuda", None, 0, "--device cuda: this process sees 0 GPUs"),
        ("cuda:2", None, 2, "--device cuda:2: this process sees 2 GPUs"),
        ("cuda:1", None, 2, None),
        ("cuda", None, 1, None),
        ("auto", "a CUDA device", 0, None),
    ],
)
def test_a_gpu_must_be_there(
    device: str, lack: str | None, count: int, message: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "missing_of_cuda", lambda built_with: lack)
    monkeypatch.setattr(preflight, "_num_gpus", lambda: count)
    config = WorkerConfig(model=ModelConfig(device=device))
    if message is None:
        check_preflight(config, folder)
        return
    with pytest.raises(ConfigError, match=message):
        check_preflight(config, folder)


def test_up_does_not_start_on_a_port_that_is_taken(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("a process was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as end:
        cli.main(["up", str(folder), "--port", str(taken.getsockname()[1])])
    assert end.value.code == 1
    assert "choose another --host or --port" in capsys.readouterr().err
