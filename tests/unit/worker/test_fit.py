"""Sizes that do not fit a model are refused by its config.json alone, with those that would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import save_file

from splitserve import cli
from splitserve.core.config import ModelConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.groups import group_of, num_groups_of
from splitserve.core.parallel import ParallelConfig
from splitserve.engine.fit import check_fit
from splitserve.offline.engine import Engine

LLAMA = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 4}
LATENT = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 16, "n_routed_experts": 4}


def folder_of(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    return tmp_path


def check(folder: Path, *, dp_attention: bool = False, **shape: Any) -> None:
    check_fit(folder, ModelConfig(model="m", dp_attention=dp_attention), ParallelConfig(**shape))


@pytest.mark.parametrize(
    ("config", "shape", "says"),
    [
        (LLAMA, {"tp_size": 2}, "9 query heads and 3 KV heads.*sizes that would do: 1, 3, 9"),
        ({"text_config": LLAMA}, {"tp_size": 4}, "sizes that would do: 1, 3, 9"),
        ({"num_attention_heads": 8}, {"tp_size": 3}, "8 query heads and 8 KV heads.*would do: 1, 2, 4, 8"),
        (LATENT, {"tp_size": 3}, "8 query heads and 1 KV heads.*would do: 1, 2, 4, 8"),
        (LLAMA, {"pp_size": 5}, "4 layers cannot be divided into 5 pipeline stages: 4 at most"),
        (LLAMA, {"pp_size": 2, "pp_layers": (2, 1)}, "2 stages must have 4 layers together"),
        (LLAMA, {"dp_attention": True}, "m has none: leave it out"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    config: Any, shape: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(folder_of(tmp_path, config), **shape)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA, {"tp_size": 3, "pp_size": 4}),
        (LLAMA, {"pp_size": 2, "pp_layers": (3, 1)}),
        (LATENT, {"tp_size": 8}),
        (LATENT, {"dp_attention": True}),
        ({"num_attention_heads": [4, 8]}, {"tp_size": 3, "pp_size": 3}),
        ({}, {"tp_size": 3, "dp_attention": True}),
        ("no JSON", {"tp_size": 3, "dp_attention": True}),
        ("[]", {"tp_size": 3}),
    ],
)
def test_what_fits_or_cannot_be_told_is_left_to_the_ranks(config: Any, shape: dict[str, Any], tmp_path: Path) -> None:
    check(folder_of(tmp_path, config), **shape)


def test_sizes_that_fit_count_the_ranks_of_all_groups(tmp_path: Path) -> None:
    model, folder = ModelConfig(model="m", dp_attention=True), folder_of(tmp_path, LATENT)
    config = WorkerConfig(model=model, parallel=ParallelConfig(tp_size=12), dp_size=2)
    with pytest.raises(ConfigError, match=r"each of 6 ranks .*would do: 2, 4, 8, 16"):
        check_fit(folder, model, group_of(config), num_groups=num_groups_of(config))
    config = msgspec.structs.replace(config, parallel=ParallelConfig(tp_size=8))
    check_fit(folder, model, group_of(config), num_groups=num_groups_of(config))


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "MODEL", "--port=0", "--tp-size=2"],
        ["serve", "MODEL", "--port=0", "--pp-size=5"],
        ["serve", "MODEL", "--port=0", "--dp-size=2", "--enable-dp-attention"],
        ["up", "MODEL", "--port=0", "--decode-tp-size=2"],
    ],
)
def test_commands_refuse_it_before_any_rank_starts(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr("uvloop.run", starts)
    monkeypatch.setattr("splitserve.deploy.placer.ChildProcess", starts)
    folder = folder_of(tmp_path, LLAMA)
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(folder) if word == "MODEL" else word for word in argv])
    assert exit_info.value.code == 2
    assert str(folder) in capsys.readouterr().err


def test_an_engine_refuses_it_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sizes that would do: 1, 3, 9"):
        Engine(str(folder_of(tmp_path, LLAMA)), tp_size=2)
