"""Check by config.json whether a model can be sharded as configured, before any rank imports torch.

Each rank has the same number of query heads, and the KV heads that those read. With fewer KV heads than ranks, several
ranks hold the same one.

The ranks check all that and more when they have loaded the model (`engine/parallel/plan.py`), a minute later. A config
with other names for its sizes is left to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError, OptionError, UnsupportedModelError, clause
from splitserve.core.parallel import ParallelConfig, WorkerShape, stage_layers
from splitserve.engine.file_checks import index_of, indexed, safetensors_files
from splitserve.engine.quantized.schemes import scheme_of
from splitserve.engine.sources import has_experts


def cannot_cut(name: str, why: str, remedy: str = "Use pipeline stages, or one rank") -> ConfigError:
    return ConfigError(f"Model {name} cannot be cut over tensor parallel ranks: {why}. {remedy}.")


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of one attention layer, on all ranks together."""

    num_query: int
    num_kv: int

    def fits(self, tp_size: int) -> bool:
        shares = self.num_kv % tp_size == 0 or tp_size % self.num_kv == 0
        return self.num_query % tp_size == 0 and shares

    def query(self, rank: int, tp_size: int) -> range:
        """Return the query heads of one rank."""
        share = self.num_query // tp_size
        return range(rank * share, (rank + 1) * share)

    def kv(self, rank: int, tp_size: int) -> range:
        """Return the KV heads of one rank: those that its query heads read."""
        group = self.num_query // self.num_kv
        query = self.query(rank, tp_size)
        return range(query.start // group, (query.stop - 1) // group + 1)

    def check(self, tp_size: int, name: str, num_groups: int = 1) -> None:
        """Raise ConfigError, with the model and the sizes that would fit, if heads cannot be divided.

        `num_groups`: of data parallel attention, with `tp_size` ranks each.
        """
        if self.fits(tp_size):
            return
        fitting = [n * num_groups for n in range(1, self.num_query + 1) if self.fits(n)]
        raise cannot_cut(
            name,
            f"its attention has {self.num_query} query heads and {self.num_kv} KV heads, and each of {tp_size} ranks "
            "needs as many of both as any other, or one KV head that several ranks hold",
            f"Tensor parallel sizes that would do: {', '.join(map(str, fitting))}",
        )


def check_fit(folder: Path, model: ModelConfig, parallel: ParallelConfig | WorkerShape, *, num_groups: int = 1) -> None:
    """Raise ConfigError, with the sizes that would fit, or UnsupportedModelError for its quantization.

    `folder`: of the model. `num_groups`: of data parallel attention; `parallel` is then the shape of one.
    """
    name, tp_size, pp_size = model.model, parallel.tp_size, parallel.pp_size
    pp_layers = parallel.pp_layers if isinstance(parallel, ParallelConfig) else ()
    config = text_config(folder)
    heads, layers = _heads(config), config.get("num_hidden_layers")
    scheme_of(model_config(folder), name)
    if tp_size > 1 and heads is not None:
        heads.check(tp_size, name, num_groups)
    if pp_size > 1 and isinstance(layers, int):
        try:
            stage_layers(layers, pp_size, pp_layers)
        except ValueError as error:
            raise ConfigError(f"Model {name}: {error}") from None
    if model.dp_attention and config and not has_experts(config):
        raise OptionError(
            "--enable-dp-attention",
            f"distributes a model's experts over ranks, and {name} has none: leave it out, then each "
            "of --dp-size ranks has the whole model",
        )


def text_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of the model's text part, or the whole config if it has no parts. Empty: not found."""
    config = model_config(folder)
    part = config.get("text_config", config)
    return part if isinstance(part, dict) else {}


def model_config(folder: Path) -> Mapping[str, Any]:
    """Return config.json. Empty: not found."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint, by the tensor's name. Raises UnsupportedModelError."""
    if (index := index_of(folder)) is not None:
        return indexed(index)
    found: dict[str, str] = {}
    for path in safetensors_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                found |= dict.fromkeys(file.keys(), path.name)
        except (OSError, SafetensorError) as error:
            problem = f"{path} is no safetensors file: {type(error).__name__}: {clause(error)}. Fetch the model again."
            raise UnsupportedModelError(problem) from error
    return found


def _heads(config: Mapping[str, Any]) -> Heads | None:
    """Return the heads of every attention layer; None: not in the config."""
    num_query = config.get("num_attention_heads")
    # Latents belong to no head: all ranks hold them.
    num_kv = 1 if config.get("kv_lora_rank") else config.get("num_key_value_heads") or num_query
    if not isinstance(num_query, int) or not isinstance(num_kv, int) or min(num_query, num_kv) < 1:
        return None
    return Heads(num_query, num_kv)
