"""Checks of a model's files by their headers, before any process starts: whole, and of the format of their names.

They take milliseconds, for a GGUF file up to a second. Imports neither torch nor transformers, except for the error of
an unknown `model_type`.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from splitserve.core.errors import ModelNotFoundError, UnsupportedModelError, clause

# Maximum bytes of a safetensors header, as in the library.
_MAX_HEADER = 100_000_000
# Characters of a wrong name that its error shows.
_MAX_SHOWN = 200
_WHOLE_FILE = "model.safetensors"
_GGUF_VERSIONS = (2, 3)
# Formats of GGUF's values by their type. `_GgufHeader.value` reads strings and arrays.
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_ALIGNMENT = 32


def path_of(model: str) -> Path:
    """Return the path that the name of a model would be. Raises ModelNotFoundError if it is empty or rejected."""
    if not isinstance(model, str) or not model.strip():
        raise ModelNotFoundError(f"{model!r} names no model: give a folder, a .gguf file or a hub model.")
    try:
        path = Path(model).expanduser()
        # Processes send each other the path as JSON.
        model.encode()
        # Fails for a folder that may not be read, too.
        with suppress(FileNotFoundError, NotADirectoryError):
            (path / "config.json").stat()
    except (OSError, RuntimeError, ValueError) as error:
        problem = clause(getattr(error, "strerror", None) or error)
        raise ModelNotFoundError(
            f"Model {model:.{_MAX_SHOWN}} is no path of a model: {problem}. Name a folder, a .gguf file or a hub model."
        ) from error
    return path


def check_folder(folder: Path) -> None:
    """Raise UnsupportedModelError for a damaged config.json or index, and for a safetensors file that is not whole."""
    _check_model_type(folder / "config.json")
    for path in safetensors_files(folder):
        _check_safetensors(path)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files with a checkpoint's weights. Raises UnsupportedModelError."""
    if (index := index_of(folder)) is not None:
        return [folder / name for name in sorted(set(indexed(index).values()))]
    whole = folder / _WHOLE_FILE
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def index_of(folder: Path) -> Path | None:
    """Return the index of a checkpoint's files. None: there is none, or a whole file, which transformers prefers."""
    index = folder / f"{_WHOLE_FILE}.index.json"
    return index if index.is_file() and not (folder / _WHOLE_FILE).is_file() else None


def indexed(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by the tensor's name. Raises UnsupportedModelError."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"{index} cannot be read: {type(error).__name__}: {clause(error)}. Fetch the model again."
        raise UnsupportedModelError(problem) from error


def _check_model_type(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {clause(error)}. Copy it again.") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object. Copy it again.")
    name = config.get("model_type")
    if name is None:
        return
    if not isinstance(name, str):
        raise UnsupportedModelError(f"{path}: model_type is {name!r}, not a name. Copy it again.")
    if _is_listed(name):
        return
    # A program can add types to those of the list.
    from transformers import CONFIG_MAPPING, __version__

    if name not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{path}: transformers {__version__} has no model_type {name!r}. Update transformers if a newer version "
            "has it, or choose another model."
        )


def _is_listed(model_type: str) -> bool:
    """Return whether a type is in the list of transformers, without its import, which takes seconds."""
    package = importlib.util.find_spec("transformers")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "models", "auto", "auto_mappings.py")
        if path.is_file() and f'("{model_type}", "' in path.read_text(encoding="utf-8"):
            return True
    return False


def _check_safetensors(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            header = file.read(length) if length <= _MAX_HEADER else b""
    except OSError as error:
        raise UnsupportedModelError(f"The weights {path} cannot be read: {clause(error)}. Copy the file.") from error
    if start == b"version ":
        raise UnsupportedModelError(
            f"{path} is a pointer of Git LFS, without weights. Run `git lfs pull` in its folder."
        )
    if len(start) < 8 or length > _MAX_HEADER or (len(header) == length and not header.startswith(b"{")):
        raise UnsupportedModelError(f"{path} is not a safetensors file. Copy it again.")
    if len(header) < length:
        raise UnsupportedModelError(f"{path} has {size} bytes, less than its header of {length}. Copy it again.")
    needed = 8 + length + _bytes_of_tensors(path, header)
    if size != needed:
        raise UnsupportedModelError(f"{path} has {size} bytes, its header requires {needed}. Copy it again.")


def _bytes_of_tensors(path: Path, header: bytes) -> int:
    try:
        tensors: Mapping[str, Any] = json.loads(header)
        return max((int(t["data_offsets"][1]) for name, t in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, LookupError) as error:
        raise UnsupportedModelError(f"{path} has a damaged header: {clause(error)}. Copy it again.") from error


def check_gguf(path: Path) -> None:
    """Raise UnsupportedModelError unless a file is a whole GGUF file with all of its model. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnsupportedModelError(f"{path} is not a GGUF file. Check the path, or copy the file again.")
        try:
            needed = _bytes_of_gguf(_GgufHeader(file, size), path)
        except EOFError:
            problem = f"{path} is cut off: it ends within its header, after {size} bytes. Copy it again."
            raise UnsupportedModelError(problem) from None
    if size < needed:
        raise UnsupportedModelError(
            f"{path} is cut off: its header requires {needed} bytes, the file has {size}. Copy it again."
        )


class _GgufHeader:
    """Reader of a GGUF file's header, after the magic. Methods raise EOFError at the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    @property
    def offset(self) -> int:
        return self._file.tell()

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))[0]

    def string(self) -> bytes:
        return self._bytes(self.number("Q"))

    def value(self, kind: int) -> Any:
        """Return a scalar or a string, and None for an array. Raises KeyError for an unknown type."""
        if kind == _GGUF_STRING:
            return self.string()
        if kind != _GGUF_ARRAY:
            return self.number(_GGUF_SCALARS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in _GGUF_SCALARS:
            self._bytes(count * struct.calcsize("<" + _GGUF_SCALARS[kind]))
        else:
            for _ in range(count):
                self.value(kind)
        return None

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self.offset:
            raise EOFError
        return self._file.read(count)


def _bytes_of_gguf(header: _GgufHeader, path: Path) -> int:
    """Return the bytes that a header requires. 0: its version, or a type in it, is unknown.

    Raises EOFError, and UnsupportedModelError for one file of a split model.
    """
    if header.number("I") not in _GGUF_VERSIONS:
        return 0
    num_tensors, num_values, alignment = header.number("Q"), header.number("Q"), _GGUF_ALIGNMENT
    try:
        for _ in range(num_values):
            name, value = header.string(), header.value(header.number("I"))
            if name == b"general.alignment" and isinstance(value, int) and value > 0:
                alignment = value
            if name == b"split.count" and isinstance(value, int) and value > 1:
                raise UnsupportedModelError(
                    f"{path} is one of the {value} files of a model. Merge them with `llama-gguf-split --merge FIRST "
                    "MERGED`, and name the merged file."
                )
        end = max(_ends_of_tensors(header, num_tensors), default=0)
    except KeyError:
        return 0
    return -(-header.offset // alignment) * alignment + end if num_tensors else header.offset


def _ends_of_tensors(header: _GgufHeader, count: int) -> Iterator[int]:
    """Yield the last offset of each tensor, from the start of the data. Raises KeyError for an unknown type."""
    from gguf import GGML_QUANT_SIZES

    # The keys are members of an enum of integers.
    sizes: Mapping[int, tuple[int, int]] = GGML_QUANT_SIZES
    for _ in range(count):
        header.string()
        num_elements = 1
        for _ in range(header.number("I")):
            num_elements *= header.number("Q")
        block, num_bytes = sizes[header.number("I")]
        yield header.number("Q") + num_elements * num_bytes // block
