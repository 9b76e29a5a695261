"""Whether a model can be cut as options say, by its config.json: refused before a rank has imported torch.

The ranks find all that and more when they have the model (`engine/parallel/plan.py`), a minute later. A config that
names its sizes in other words is left to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitserve.config import WorkerConfig
from splitserve.core.parallel import stage_layers
from splitserve.engine.parallel.heads import Heads
from splitserve.engine.sources import has_experts
from splitserve.errors import ConfigError


def check_worker_fit(config: WorkerConfig, folder: Path) -> None:
    """`check_fit` of all that a worker is told."""
    parallel, model = config.parallel, config.model
    check_fit(
        folder,
        model.model,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pp_layers=parallel.pp_layers,
        dp_attention=model.dp_attention,
    )


def check_fit(
    folder: Path,
    name: str,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    pp_layers: Sequence[int] = (),
    dp_attention: bool = False,
) -> None:
    """Raises ConfigError, with the sizes that would do. `folder`: of the model; `name`: as the user calls it."""
    config = text_config(folder)
    heads, layers = _heads(config), config.get("num_hidden_layers")
    if tp_size > 1 and heads is not None:
        heads.check(tp_size, name)
    if pp_size > 1 and isinstance(layers, int):
        try:
            stage_layers(layers, pp_size, pp_layers)
        except ValueError as error:
            raise ConfigError(f"Model {name}: {error}") from None
    if dp_attention and config and not has_experts(config):
        raise ConfigError(
            f"--enable-dp-attention deals a model's experts out to ranks, and {name} has none: leave it out, then each "
            "of --dp-size ranks has the whole model"
        )


def text_config(folder: Path) -> Mapping[str, Any]:
    """Of the part that makes text, where a model has others; empty where it cannot be told."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    part = config.get("text_config", config) if isinstance(config, dict) else {}
    return part if isinstance(part, dict) else {}


def _heads(config: Mapping[str, Any]) -> Heads | None:
    """Of every attention layer; None: not told."""
    num_query = config.get("num_attention_heads")
    # Latents are of no head: all ranks hold them.
    num_kv = 1 if config.get("kv_lora_rank") else config.get("num_key_value_heads") or num_query
    if not isinstance(num_query, int) or not isinstance(num_kv, int) or min(num_query, num_kv) < 1:
        return None
    return Heads(num_query, num_kv)
