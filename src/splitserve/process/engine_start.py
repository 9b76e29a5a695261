"""Start of engine processes, which import torch and transformers for seconds.

`give_head_start` starts the first of them before the command imports its own modules and reads its options.
`splitserve serve` takes it as its scheduler, and `splitserve up` as the template of its workers. Until then it holds
nothing, and it ends with this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from splitserve.core.environment import OPENMP_ENVIRONMENT, set_compile_cache
from splitserve.process import forks, template

# Command that starts an engine process. The name of its module follows.
QUICK_START = (sys.executable, "-m", "splitserve.process.quick_start")
# Options of a command that prints and ends.
_ANSWERS = ("--help", "--print-config")
# Options with which a command needs no process, or another one.
_WITHOUT_HEAD_START = {"serve": (*_ANSWERS, "--node-rank"), "up": (*_ANSWERS, "--device")}


def spawn(command: Sequence[str], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start an engine process, which waits for the line with its configuration."""
    return subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=forks.STANDARD_ERROR,
        start_new_session=True,
        env={**OPENMP_ENVIRONMENT, **os.environ},
        pass_fds=descriptors,
    )


def give_head_start(words: Sequence[str]) -> None:
    """Start the engine process that this command line needs first. No-op for most commands, and if that fails."""
    command, *options = words or ("",)
    if command not in _WITHOUT_HEAD_START:
        return
    if any(word.partition("=")[0] in _WITHOUT_HEAD_START[command] for word in options):
        return
    set_compile_cache()
    with suppress(OSError):
        if command == "up":
            if template.is_supported():
                template.start_early_template()
        elif not forks.has_early():
            forks.set_early(spawn((*QUICK_START, template.SCHEDULER_MODULE)))
