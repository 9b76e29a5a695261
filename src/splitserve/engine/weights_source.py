"""Weights in a file in shared memory, as a folder that the ordinary loader reads.

A trainer on the same host writes all weights of the model, with the names of the checkpoint, to a safetensors file in
/dev/shm. Names, shapes and dtypes are in the header of the file, so nothing is unpickled. The file is copied to a
temporary folder: loaded models keep parts of their files mapped, and the trainer may write its next weights at once.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from splitserve.core.errors import ConfigError, clause
from splitserve.core.memory import WeightsSource
from splitserve.engine.file_checks import path_of
from splitserve.engine.sources import check_form
from splitserve.process.owned_folder import OwnedFolder

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9._-]{0,254})")


def check_source(source: WeightsSource, quantization: str) -> None:
    """Check file, or folder and form of the weights, before a load. Raises ConfigError or ModelLoadError.

    `quantization`: of the weights in use; empty: none. Hub names and GGUF files take long, so they are not checked.
    """
    name = source.name
    if source.is_shared_memory:
        _file_of(name)
    elif path_of(name).is_dir() or (name.startswith(("/", ".", "~")) and not name.lower().endswith(".gguf")):
        check_form(name, quantization)


def folder_around(name: str, model: Path) -> OwnedFolder:
    """Return a folder with the weights of the shared memory file `name`, and the other files of the folder `model`.

    Raises ConfigError unless the file has exactly the tensors of `model`.
    """
    file = _file_of(name)
    found, needed = _shapes([file]), _shapes(sorted(model.glob("*.safetensors")))
    if not needed:
        raise ConfigError(f"{name}: the model in {model} has no safetensors files, so names of weights are unknown.")
    if different := sorted(key for key in found.keys() | needed.keys() if found.get(key) != needed.get(key)):
        key = different[0]
        raise ConfigError(
            f"{name}: {len(different)} tensors are missing or differ from the model's, such as {key}: "
            f"{found.get(key, 'absent')}, not {needed.get(key, 'absent')}. Write all weights under the names of the "
            "checkpoint, in one file."
        )
    folder = OwnedFolder()
    try:
        for path in model.iterdir():
            is_weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
            if path.is_file() and not is_weights and not (folder.path / path.name).exists():
                (folder.path / path.name).symlink_to(path.resolve())
        shutil.copyfile(file, folder.path / "model.safetensors")
    except OSError as error:
        folder.close()
        raise ConfigError(f"{name} cannot be copied to {folder.path}: {clause(error)}. Make room there.") from error
    except BaseException:
        folder.close()
        raise
    return folder


def _file_of(name: str) -> Path:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"name {name!r}: give the name of a file in {SHARED_MEMORY}, without folders.")
    file = SHARED_MEMORY / match[1]
    if file.is_symlink() or not file.is_file():
        raise ConfigError(f"name {name!r}: there is no file {file} on the worker's host. Write it before the update.")
    return file


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name. Raises ConfigError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {clause(error)}.") from error
    return shapes
