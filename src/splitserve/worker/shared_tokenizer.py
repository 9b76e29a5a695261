"""Vocabulary of a tokenizer in memory that the workers of a template share (ADR 70).

The template loads it before it forks the first worker of a model. A worker takes it if the files are still the same.
"""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from splitserve.api.tokenizer import Tokenizer, load_backend
from splitserve.engine.sources import find_model
from splitserve.process.settings import trim_memory

logger = logging.getLogger(__name__)

# Size and time of the last change, in ns, of each file of a model.
_Files = dict[Path, tuple[int, int]]
# The latest one that was shared, with the files of its model at that time.
_shared: tuple[_Files, tokenizers.Tokenizer] | None = None


def share_tokenizer(model: str) -> None:
    """Load the vocabulary of a model for all processes that this one forks. No-op if the model is not on this machine.

    If it cannot be loaded, its worker reports that.
    """
    global _shared
    try:
        folder = find_model(model)
        if folder is None or not (folder / "tokenizer.json").is_file():
            # Other forms need transformers, which may start threads.
            return
        files = _files(folder)
        if _shared is None or _shared[0] != files:
            # A thread has a heap of its own. In the main one, processes that fork would write between its words.
            with ThreadPoolExecutor(1) as thread:
                _shared = files, thread.submit(load_backend, folder).result()
            trim_memory()
            gc.freeze()
    # The library raises plain exceptions.
    except Exception as error:
        logger.debug("no shared tokenizer of %s: %r", model, error)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder, with the shared vocabulary if it is of these files.

    Raises ModelLoadError.
    """
    backend = _shared[1] if _shared is not None and _shared[0] == _files(folder) else None
    tokenizer = Tokenizer.load(folder, backend)
    trim_memory()
    return tokenizer


def _files(folder: Path) -> _Files:
    found = {path: path.stat() for path in folder.iterdir()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}
