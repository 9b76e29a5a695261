"""Start of engine processes, which import torch and transformers for seconds.

`begin` gives the first of them a head start: it imports while the command still imports its own modules and reads its
options. `splitserve serve` takes it as its scheduler, and `splitserve up` as the template of its workers. Without an
owner it holds nothing, and it ends with this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from splitserve.core.environment import OPENMP_ENVIRONMENT, set_compile_cache
from splitserve.process import template
from splitserve.process.forks import EngineProcess, start_early

# Command that starts an engine process. The name of its module follows.
QUICK_START = (sys.executable, "-m", "splitserve.process.quick_start")
# The descriptor itself, because an embedding program may have replaced sys.stderr by an object without one.
_STANDARD_ERROR = 2
# Options with which a command answers at once. `up` has no template for workers on another device than the CPU.
_WITHOUT = {"serve": ("--help", "--print-config"), "up": ("--help", "--print-config", "--device")}


def spawn(command: Sequence[str], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start an engine process, which waits for the line with its configuration."""
    return subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=_STANDARD_ERROR,
        start_new_session=True,
        env={**OPENMP_ENVIRONMENT, **os.environ},
        pass_fds=descriptors,
    )


def begin(words: Sequence[str]) -> None:
    """Start the engine process that the command line `words` needs first. No-op for most commands."""
    command, *options = words or ("",)
    if command not in _WITHOUT or any(word.partition("=")[0] in _WITHOUT[command] for word in options):
        return
    set_compile_cache()
    if command == "serve":
        start_early(_scheduler)
    elif template.is_supported():
        template.begin()


def _scheduler() -> EngineProcess:
    return spawn((*QUICK_START, template.SCHEDULER_MODULE))
