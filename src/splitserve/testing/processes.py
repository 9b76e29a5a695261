"""Real processes for tests: a worker, a router or a whole cluster, gone when the `with` block is left.

Readiness is a ready file, logs go to the test's own folder, and what is stopped is stopped by its pid.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from splitserve.launch.child import POLL_INTERVAL, PROGRAM, ChildProcess
from splitserve.launch.ready_file import ReadyInfo


@contextmanager
def running(
    args: Sequence[str],
    folder: Path,
    *,
    name: str = "process",
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[ChildProcess]:
    """`splitserve ARGS` (`serve ...` or `router ...`), not yet ready. Its log is `folder`/`name`.log."""
    child = ChildProcess(name, args, folder, env=env, program=program)
    try:
        yield child
    finally:
        child.close()


def wait_ready(child: ChildProcess, timeout: float = 120.0) -> ReadyInfo:
    """Raises AssertionError with the end of its log where it ends or takes too long."""
    deadline = time.monotonic() + timeout
    while child.ready is None:
        assert child.exit_code is None, f"{child.name} ended with code {child.exit_code}:\n{child.log_tail()}"
        assert time.monotonic() < deadline, f"{child.name} was not ready after {timeout:g} s:\n{child.log_tail()}"
        time.sleep(POLL_INTERVAL)
    return child.ready
