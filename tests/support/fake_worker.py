"""Whole worker process around a fake scheduler: `python -m support.fake_worker SCENARIO serve ...`.

The command line after the scenario is the real one. Within the block of `forked_workers` it forks from the template.
"""

from __future__ import annotations

import signal
import sys
import weakref
from typing import Any

from splitserve import cli
from splitserve.process.process_end import install
from splitserve.ranks import processes
from splitserve.worker import start
from splitserve.worker.shared_tokenizer import load_tokenizer
from support.fake_scheduler import FOLLOW, FOLLOWER_REFUSES, REFUSE_ALWAYS, SIGNAL, STUCK

# Followed by the scenario.
PROGRAM = (sys.executable, "-m", "support.fake_worker")


def main() -> None:
    scenario, *command = sys.argv[1:]
    install()
    fake = (sys.executable, "-m", "support.fake_scheduler")
    processes.SCHEDULER_COMMAND = (*fake, scenario)
    processes.FOLLOWER_COMMAND = (*fake, REFUSE_ALWAYS if scenario == FOLLOWER_REFUSES else FOLLOW)
    if scenario == STUCK:
        # Only a kill ends it.
        processes.END_TIMEOUT = 600.0
    if scenario == SIGNAL:
        start.load_tokenizer = _load_tokenizer_with_signal  # type: ignore[attr-defined, assignment]
    cli.main(command)


def _load_tokenizer_with_signal(*args: Any) -> Any:
    class Object:
        pass

    # An exception that is raised in this callback is printed and ignored.
    reference = weakref.ref(Object(), lambda _: signal.raise_signal(signal.SIGINT))
    assert reference() is None
    return load_tokenizer(*args)


if __name__ == "__main__":
    main()
