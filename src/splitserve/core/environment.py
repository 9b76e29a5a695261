"""Variables of the environment: folder of cached files and how to write there, what torch reads on its import."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from splitserve.core.errors import ConfigError

# Threads that wait for each other at the end of a parallel region spin this often, then sleep. With OpenMP's default,
# a worker on a shared core spins away the time its partner needs: steps took 3 to 4 times as long (docs/log.md).
# OpenMP reads it when it is loaded.
OPENMP_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}


def cache_dir() -> Path:
    """Return the folder of models, packed weights and other cached files: $SPLITSERVE_CACHE, or ~/.cache/splitserve.

    Raises ConfigError if this user has no home folder.
    """
    try:
        return Path(os.environ.get("SPLITSERVE_CACHE") or Path.home() / ".cache" / "splitserve")
    except RuntimeError:
        raise ConfigError("this user has no home folder: set SPLITSERVE_CACHE or HOME to a folder") from None


def store_in_cache(path: Path, content: bytes) -> None:
    """Replace a file of the cache, wholly or not at all. A cache that cannot be written only costs time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def set_compile_cache() -> None:
    """Have torch keep its compile cache in Splitserve's, unless the user set its folder or that is not writable.

    Call it before torch is imported, here or in a process that inherits the environment. Its own default is a folder
    in the temporary directory. The import of `torch._dynamo` creates it, and it stays.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    # ConfigError: this user has no home folder.
    with suppress(OSError, ConfigError):
        folder = cache_dir() / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
