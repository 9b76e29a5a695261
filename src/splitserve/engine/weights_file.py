"""A file of tensors, which all workers of a host map read-only. So each tensor is in memory once per host.

    tensors, each at a multiple of 64 bytes | header (JSON) | tail: size of the header, its digest, magic

1. `WeightsFolder.open` maps the file of a key if it is whole: key, sizes and the digest of every byte must match.
2. `WeightsFolder.store` writes a new file beside it, syncs it and renames it. One process of the host at a time does.
3. A builder that was killed leaves a `.partial` file, which no process maps. The next builder removes it.

A write through a mapped tensor ends the process with SIGSEGV. XXH3 finds mistakes, not forgeries.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import filelock
import msgspec
import torch
import xxhash

from splitserve.core.errors import clause

logger = logging.getLogger(__name__)

# Increased if the format of the file changes.
_MAGIC = b"SPLTWTS1"
# Size and digest of the header, and the magic.
_TAIL = struct.Struct("<QQ8s")
# Bytes of a cache line: kernels read whole vectors.
_ALIGNMENT = 64
# Files that stay when a new one is stored: those that were used last.
_MAX_FILES = 8


class UnusableWeightsError(Exception):
    """The file is damaged, or it does not fit the model."""


class TensorSlice(msgspec.Struct, frozen=True, array_like=True):
    """Place of one tensor in the file."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class _Header(msgspec.Struct, frozen=True):
    key: str
    # Data of the owner of the file.
    facts: msgspec.Raw
    # Name -> place. Names of the same tensor have the same place.
    tensors: dict[str, TensorSlice]
    num_bytes: int
    # XXH3 of the first `num_bytes` bytes of the file.
    digest: int


class MappedWeights:
    """Tensors in a read-only mapping. They keep the mapping alive."""

    def __init__(self, path: Path, header: _Header, memory: torch.Tensor) -> None:
        self.path = path
        self.facts = bytes(header.facts)
        self._slices = header.tensors
        self._memory = memory

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, place in self._slices.items():
            dtype = getattr(torch, place.dtype)
            num_bytes = dtype.itemsize * torch.Size(place.shape).numel()
            yield name, self._memory[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)


class WeightsFolder:
    """Folder with one file for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: str) -> Path:
        return self._folder / f"{key}.weights"

    def open(self, key: str) -> MappedWeights | None:
        """Map the file of `key`. Return None if there is none. Raises UnusableWeightsError, OSError."""
        path = self.path(key)
        try:
            with path.open("rb") as file:
                found = _map(path, file, key)
        except FileNotFoundError:
            return None
        # The time of use, for `_remove_old`. The folder may be read-only.
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    @contextlib.contextmanager
    def building(self, timeout: float) -> Iterator[None]:
        """Hold the lock of all builders on this host. Raises OSError, and filelock.Timeout after `timeout` seconds."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self._folder / "build.lock", timeout=timeout):
            yield

    def store(self, key: str, facts: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the file of `key` and remove old files. Call with the lock held. Raises OSError."""
        for path in self._folder.glob("*.partial"):
            # Its builder was killed, because this process holds the lock.
            path.unlink(missing_ok=True)
        partial = self._folder / f"{key}.partial"
        try:
            with partial.open("xb") as file:
                _write(file, key, facts, tensors)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path(key))
            _sync_folder(self._folder)
        finally:
            partial.unlink(missing_ok=True)
        self._remove_old()

    def remove(self, key: str) -> None:
        """Remove a file that cannot be used. Processes that have mapped it keep their mapping."""
        with contextlib.suppress(OSError):
            self.path(key).unlink(missing_ok=True)

    def _remove_old(self) -> None:
        def last_use(path: Path) -> float:
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
            return 0.0

        for path in sorted(self._folder.glob("*.weights"), key=last_use, reverse=True)[_MAX_FILES:]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                logger.info("removed the packed weights unused for longest max_files=%d file=%s", _MAX_FILES, path)


def _write(file: BinaryIO, key: str, facts: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    places: dict[str, TensorSlice] = {}
    # Tensors that several names share are written once.
    written: dict[tuple[int, str, tuple[int, ...]], TensorSlice] = {}
    digest, end = xxhash.xxh3_64(), 0
    for name, tensor in tensors.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        same = (tensor.data_ptr(), dtype, shape)
        if same not in written:
            content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            padding = bytes(-end % _ALIGNMENT)
            for part in (padding, content):
                file.write(part)
                digest.update(part)
            written[same] = TensorSlice(end + len(padding), dtype, shape)
            end += len(padding) + len(content)
        places[name] = written[same]
    header = msgspec.json.encode(_Header(key, msgspec.Raw(facts), places, end, digest.intdigest()))
    file.write(header + _TAIL.pack(len(header), xxhash.xxh3_64_intdigest(header), _MAGIC))


def _map(path: Path, file: BinaryIO, key: str) -> MappedWeights:
    size = os.fstat(file.fileno()).st_size
    if size < _TAIL.size:
        raise UnusableWeightsError("it is truncated")
    mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    content = memoryview(mapping)
    header_size, header_digest, magic = _TAIL.unpack(content[-_TAIL.size :])
    encoded = content[max(0, size - _TAIL.size - header_size) : size - _TAIL.size]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(encoded) != header_digest:
        raise UnusableWeightsError("its header is damaged, or it is truncated")
    try:
        header = msgspec.json.decode(encoded, type=_Header)
    except msgspec.MsgspecError as error:
        raise UnusableWeightsError(f"its header is of another format: {clause(error)}") from error
    if header.key != key or header.num_bytes + header_size + _TAIL.size != size:
        raise UnusableWeightsError("it is another model's, or its size is wrong")
    if xxhash.xxh3_64_intdigest(content[: header.num_bytes]) != header.digest:
        raise UnusableWeightsError("its weights are damaged")
    with warnings.catch_warnings():
        # torch warns that the memory is read-only, which is the purpose.
        warnings.simplefilter("ignore")
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return MappedWeights(path, header, memory)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
