"""Real processes for tests: a worker, a router or a whole cluster, ended at the end of the `with` block.

Readiness is a ready file, logs go to the test's own folder, and processes are stopped by pid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from splitserve.process.child import PROGRAM, ChildProcess
from splitserve.process.lifecycle import ReadyInfo
from support.worker_template import template_for


@contextmanager
def running(
    args: Sequence[str],
    folder: Path,
    *,
    name: str = "process",
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[ChildProcess]:
    """Run `splitserve ARGS` (`serve ...` or `router ...`), not yet ready. Its log is `folder`/`name`.log."""
    template = template_for(args, program, env or {})
    child = ChildProcess(name, args, folder, env=env, program=program, template=template)
    try:
        yield child
    finally:
        child.close()


def wait_ready(child: ChildProcess, timeout: float = 120.0) -> ReadyInfo:
    """Wait until the process is ready. Raises ClusterError with the end of its log."""
    return child.wait_ready(timeout)


def unended(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that have not ended. Ended ones may be zombies, or be reaped at any moment."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
