"""Logging of a process: one line per record on standard error, with time, level and logger."""

from __future__ import annotations

import logging
import sys

from splitserve.core.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
# Libraries, and the lowest level of their records that is useful to operators.
_QUIET = {"uvicorn.error": logging.WARNING, "uvicorn.access": logging.WARNING, "httpx": logging.WARNING}


def setup_logger(level: str) -> None:
    """Set up logging. Raises ConfigError for an unknown level."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"--log-level {level!r}: choose one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s [%(name)s] %(message)s",
        force=True,
    )
    # Our lines do not contain the source location; logging's documentation describes this way to skip its look-up.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name, minimum in _QUIET.items():
        logging.getLogger(name).setLevel(max(minimum, logging.getLogger().level))
