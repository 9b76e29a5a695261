"""Logging of a process: one line a record on standard error, with time, level and part."""

from __future__ import annotations

import logging
import sys

from splitserve.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
# Libraries whose chatter below this level helps nobody.
_QUIET = {"uvicorn.error": logging.WARNING, "uvicorn.access": logging.WARNING, "httpx": logging.WARNING}


def setup_logger(level: str) -> None:
    """Raises ConfigError for an unknown level."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"--log-level {level!r}: choose one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s [%(name)s] %(message)s",
        force=True,
    )
    # What our lines do not show need not be found out, as logging's own documentation says: where each line comes from.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name, minimum in _QUIET.items():
        logging.getLogger(name).setLevel(max(minimum, logging.getLogger().level))
