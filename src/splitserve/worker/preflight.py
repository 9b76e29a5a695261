"""Checks of a worker before any process starts: its options against the files of the model and this machine.

Imports no torch. The ranks check what needs a loaded model.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.groups import group_of, num_groups_of
from splitserve.core.machine import parse_cpus
from splitserve.engine.draft_fit import check_draft
from splitserve.engine.fit import check_fit, text_config
from splitserve.engine.text_part import check_text_part
from splitserve.transfer.transports import missing_of_cuda

# Smallest context and KV pool, in tokens: a short chat request with its template, and an answer.
MIN_TOKENS = 128
# Files from which a tokenizer can be loaded.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_DEVICE = re.compile(r"auto|cpu|cuda(?::(\d+))?")


def check_preflight(config: WorkerConfig, folder: Path) -> None:
    """Raise ConfigError for a worker that could not load or serve. `folder`: of the model."""
    model, cache = config.model, config.cache
    check_text_part(folder, model.model)
    check_fit(folder, config.model, group_of(config), num_groups=num_groups_of(config))
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"MODEL {model.model}: {folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json of the "
            "model there"
        )
    if model.context_length is not None and model.context_length < MIN_TOKENS:
        raise OptionError(
            "--context-length", f"{model.context_length}: too small for a chat request; give {MIN_TOKENS} or more"
        )
    positions = text_config(folder).get("max_position_embeddings")
    if model.context_length is not None and isinstance(positions, int) and model.context_length > positions:
        raise OptionError(
            "--context-length",
            f"{model.context_length}: {model.model} has positions for {positions} tokens; give {positions} or less",
        )
    if cache.max_total_tokens is not None and cache.max_total_tokens < MIN_TOKENS:
        raise OptionError(
            "--max-total-tokens", f"{cache.max_total_tokens}: too small for one request; give {MIN_TOKENS} or more"
        )
    check_draft(config.speculative, folder, model.model)
    _check_cpus(model.cpu_affinity)
    _check_device(model.device)


def _check_cpus(text: str | None) -> None:
    if text is None or not hasattr(os, "sched_getaffinity"):
        return
    own = os.sched_getaffinity(0)
    try:
        others = parse_cpus(text) - own
    except ValueError as error:
        raise OptionError("--cpu-affinity", f"{text}: {error}; give core numbers such as 0-3,8") from None
    if others:
        raise OptionError(
            "--cpu-affinity", f"{text}: this process may not use core {min(others)}; it has {sorted(own)}"
        )


def _check_device(device: str) -> None:
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise OptionError("--device", f"{device}: choose auto, cpu, cuda or cuda:N")
    if not device.startswith("cuda"):
        return
    if lack := missing_of_cuda("CUDA"):
        raise OptionError("--device", f"{device}: needs {lack}; or give --device cpu")
    count = _num_gpus()
    if int(match[1] or 0) >= count:
        raise OptionError("--device", f"{device}: this process sees {count} GPUs; check CUDA_VISIBLE_DEVICES")


def _num_gpus() -> int:
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    is_known = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if is_known else 0
