"""Settings of the whole process that a command changes when it runs inside a test, such as `cli.main(["serve", ...])`.

A handler that writes to the standard error of an earlier test fails with each later line of a log. Its traceback then
is on the standard error of the test that happens to run, for example when a task of a failed test is collected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_FLAGS = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing")
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def restored_settings() -> Iterator[None]:
    root = logging.getLogger()
    level, flags, folder = root.level, {name: getattr(logging, name) for name in _FLAGS}, os.environ.get(_FOLDER)
    try:
        yield
    finally:
        # Not those of pytest, which has others in each phase of a test.
        for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
            root.removeHandler(handler)
        root.setLevel(level)
        for name, value in flags.items():
            setattr(logging, name, value)
        if folder is None:
            os.environ.pop(_FOLDER, None)
