"""Vocabulary of a tokenizer in memory that the workers of a template share (ADR 70).

The template loads it before it forks the first worker of a model. A worker takes it if the files are still the same.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import tokenizers

from splitserve.api.tokenizer import Tokenizer, load_backend
from splitserve.engine.sources import find_model
from splitserve.process.settings import trim_memory

logger = logging.getLogger(__name__)

# Seconds in which the system ends a thread that was joined.
_THREAD_TIMEOUT = 1.0
# Size and time of the last change, in ns, of each file of a model.
_Files = dict[Path, tuple[int, int]]
# Vocabulary that was shared last, with the files of its model before the load. None: nothing was shared.
_shared: tuple[_Files, tokenizers.Tokenizer] | None = None


def share_tokenizer(model: str) -> None:
    """Load the vocabulary of a model for all processes that this one forks. No-op if the model is not on this machine.

    If it cannot be loaded, its worker reports that.
    """
    global _shared
    try:
        folder = find_model(model)
        if folder is None or not (folder / "tokenizer.json").is_file():
            # Other forms are converted, which takes long.
            return
        files = _files(folder)
        if _shared is None or _shared[0] != files:
            # A thread has a heap of its own. In the main heap, forked processes would reuse free memory between the
            # entries, and so copy these pages.
            with ThreadPoolExecutor(1) as thread:
                _shared = files, thread.submit(load_backend, folder).result()
            _wait_for_one_thread()
            trim_memory()
            gc.freeze()
    # The library raises plain exceptions, and a panic of it is a BaseException.
    except BaseException as error:
        logger.debug("no shared tokenizer of %s: %r", model, error)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder, with the shared vocabulary if it is of these files.

    Raises ModelLoadError.
    """
    backend = None
    # OSError: a file was removed meanwhile, or a link has no target.
    with suppress(OSError):
        backend = _shared[1] if _shared is not None and _shared[0] == _files(folder) else None
    tokenizer = Tokenizer.load(folder, backend)
    trim_memory()
    return tokenizer


def _wait_for_one_thread() -> None:
    """Wait until the system has ended a thread that was joined, because it may still hold a lock of the C library."""
    deadline = time.monotonic() + _THREAD_TIMEOUT
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)


def _files(folder: Path) -> _Files:
    found = {path: path.stat() for path in folder.iterdir()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}
