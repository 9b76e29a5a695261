"""Fingerprint of a model: a hash of every byte of its weights and tokenizer files, and of its config.

1. Each file is hashed in pieces, by several threads. XXH3 finds mistakes, not forgeries.
2. The digest of a file is kept in the cache, under its path, size, inode and times. Later starts do not read it.
3. The fingerprint is a hash over all names and digests. Copies of a model have the same one, wherever they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import filelock
import msgspec
import xxhash

from splitserve.core.environment import cache_dir, store_in_cache
from splitserve.core.errors import UNREADABLE

# Files hashed by their bytes. config.json is hashed by its values.
_FILES = (
    "*.safetensors",
    "*.gguf",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
# Keys of a saved config that record its history, not the model.
_HISTORY_KEYS = ("transformers_version", "_name_or_path")
# Bytes that one thread hashes at a time, and bytes that it reads at a time.
_PIECE_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_MAX_THREADS = 4
# Two changes within one tick of the kernel's clock look alike: only digests of files older than this are kept.
_SETTLED_NS = 2_000_000_000
# Seconds to wait for another process that hashes the same file.
_LOCK_TIMEOUT = 600.0


# Real path, size, mtime and ctime in nanoseconds, and inode of a file: they change when its content does. Unlike mtime,
# no program can set ctime.
_FileState = tuple[str, int, int, int, int]


def _state_of(path: Path) -> _FileState:
    real = path.resolve()
    stat = real.stat()
    return str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def file_states(folder: Path) -> dict[str, _FileState]:
    """Return the states of all files that a fingerprint depends on. They change if one of them does. Raises OSError."""
    return {name: _state_of(path) for name, path in {**_files_of(folder), "": folder / "config.json"}.items()}


def begin_fingerprint(folder: Path) -> Future[str]:
    """Run `model_fingerprint` in a thread, while the same files are loaded."""
    thread = ThreadPoolExecutor(1, "fingerprint")
    fingerprint = thread.submit(model_fingerprint, folder)
    thread.shutdown(wait=False)
    return fingerprint


def model_fingerprint(folder: Path) -> str:
    """Return the fingerprint of the model in `folder`. Raises OSError, and ValueError for an invalid config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in _HISTORY_KEYS:
        config.pop(key, None)
    whole = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    files = _files_of(folder)
    for name in sorted(files):
        whole.update(f"\n{name}:{_file_digest(files[name])}".encode())
    return whole.hexdigest()


def _files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}


def _file_digest(path: Path) -> str:
    """Return the digest from the cache, or compute and store it. Only one process at a time computes it."""
    state = _state_of(path)
    name, size, mtime_ns, ctime_ns, _ = state
    entry_path = cache_dir() / "fingerprints" / f"{xxhash.xxh3_64_hexdigest(name.encode())}.json"
    if (digest := _cached(entry_path, state)) is not None:
        return digest
    with _one_at_a_time(entry_path):
        if (digest := _cached(entry_path, state)) is not None:
            return digest
        digest = _hash(path, size)
        if _state_of(path) == state and time.time_ns() - max(mtime_ns, ctime_ns) > _SETTLED_NS:
            store_in_cache(entry_path, msgspec.json.encode((state, digest)))
        return digest


def _hash(path: Path, size: int) -> str:
    """Return the digest over the digests of all pieces."""
    offsets = range(0, size, _PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        if len(offsets) < 2:
            pieces = [_hash_piece(file.fileno(), offset) for offset in offsets]
        else:
            with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "fingerprint") as pool:
                pieces = list(pool.map(lambda offset: _hash_piece(file.fileno(), offset), offsets))
    return xxhash.xxh3_128_hexdigest(f"{size}:".encode() + b"".join(pieces))


def _hash_piece(descriptor: int, offset: int) -> bytes:
    digest, buffer, stop = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES)), offset + _PIECE_BYTES
    while offset < stop:
        count = os.preadv(descriptor, [buffer[: stop - offset]], offset)
        if count == 0:
            break
        digest.update(buffer[:count])
        offset += count
    return digest.digest()


def _cached(entry_path: Path, state: _FileState) -> str | None:
    try:
        cached_state, digest = msgspec.json.decode(entry_path.read_bytes(), type=tuple[_FileState, str])
    except (OSError, *UNREADABLE):
        return None
    return digest if cached_state == state else None


@contextlib.contextmanager
def _one_at_a_time(entry_path: Path) -> Iterator[None]:
    """Hold the lock of a digest. Ranks of a worker start together; without it, each computes the digest.

    Digests share sixteen locks, by the first character of their names. So lock files do not pile up, and none is ever
    removed while a process waits for it.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, filelock.Timeout):
            entry_path.parent.mkdir(parents=True, exist_ok=True)
            lock = entry_path.with_name(f"{entry_path.name[0]}.lock")
            held.enter_context(filelock.FileLock(lock, timeout=_LOCK_TIMEOUT))
        yield
