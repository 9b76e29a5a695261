"""Template of workers for a folder of tests: workers fork from it, which saves each the import of torch.

Workers that accept fault orders and workers with failing followers fork from it, too. A worker with another program or
another environment starts by itself, as without the template.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from splitserve.core.environment import OPENMP_ENVIRONMENT
from splitserve.deploy.placer import LocalPlacer, ProcessSpec
from splitserve.process.child import PROGRAM
from splitserve.process.forks import ForkedProcess
from splitserve.process.template import (
    WORKER_MODULES,
    ForkRequest,
    TemplateProcess,
    _adopt_orphans,
    is_supported,
    worker_environment,
)
from splitserve.tools.chaos import faults
from support import failing_follower, fake_worker, forked_worker

# Variables in which a forked process may differ from the template: no module reads them on import. Modules that were
# imported by tests of the same process set the last ones, and a worker sets them again.
_OWN_VARIABLES = {"PYTEST_CURRENT_TEST", "TMPDIR", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR"}
_OWN_VARIABLES |= {"MC_FORCE_TCP", "MC_TCP_PROTO", "PLAT"}
# Programs of workers that may fork.
_PROGRAMS = (PROGRAM, faults.PROGRAM, failing_follower.PROGRAM)
# torch reads it on import. Most workers of tests compute on one thread.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class _SharedTemplate(TemplateProcess):
    """Template of a process that adopts orphans only during a fork.

    At other times the ended schedulers of killed workers would stay as zombies of the test process.
    """

    def __init__(self) -> None:
        super().__init__(WORKER_MODULES, worker_environment({}))
        _adopt_orphans(False)
        self._environment = _compared(_ONE_THREAD)
        self._forking = threading.Lock()

    def fork(self, request: ForkRequest, output: int) -> ForkedProcess | None:
        with self._forking:
            _adopt_orphans(True)
            try:
                return super().fork(request, output)
            finally:
                _adopt_orphans(False)

    def can_fork(self, args: Sequence[str], program: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a process with these settings is a worker that may fork from it."""
        is_known = tuple(program) in _PROGRAMS or _is_fake(program)
        return "serve" in args[:1] and is_known and _compared(env) == self._environment


class _WorkerTemplate:
    """The shared template for one of the programs."""

    def __init__(self, shared: _SharedTemplate, program: Sequence[str]) -> None:
        self._shared = shared
        self._program = tuple(program)
        self.pid = shared.pid

    def fork(self, request: ForkRequest, output: int) -> ForkedProcess | None:
        module = request.module if self._program == PROGRAM else self._program[-1]
        env, early = {**request.env, forked_worker.MODULE: module}, request.early
        if self._program == faults.PROGRAM:
            early = faults.__name__
            # The first scheduler forks before the front end sets this variable.
            ready_file = Path(request.args[request.args.index("--ready-file") + 1])
            env[faults.FAULT_FILE] = str(faults.fault_file(ready_file))
        changed = msgspec.structs.replace(request, module=forked_worker.__name__, early=early, env=env)
        return self._shared.fork(changed, output)


class _FakeWorkerTemplate:
    """The shared template for workers around a fake scheduler, which starts by itself."""

    def __init__(self, shared: _SharedTemplate, scenario: str) -> None:
        self._shared = shared
        self._scenario = scenario
        self.pid = shared.pid

    def fork(self, request: ForkRequest, output: int) -> ForkedProcess | None:
        args = (self._scenario, *request.args)
        changed = msgspec.structs.replace(request, module=fake_worker.__name__, args=args, early=None, model=None)
        return self._shared.fork(changed, output)


def _is_fake(program: Sequence[str]) -> bool:
    return tuple(program[:-1]) == fake_worker.PROGRAM


_shared: TemplateProcess | None = None


def _compared(env: Mapping[str, str]) -> dict[str, str]:
    # The template has those of OpenMP, and perhaps a test of this process has set them.
    values = {**OPENMP_ENVIRONMENT, **os.environ, **env}
    return {name: value for name, value in values.items() if name not in _OWN_VARIABLES}


def template_for(args: Sequence[str], program: Sequence[str], env: Mapping[str, str]) -> TemplateProcess | None:
    """Return the template for a process with these settings. None: it starts by itself."""
    if not isinstance(_shared, _SharedTemplate) or not _shared.can_fork(args, program, env):
        return None
    if _is_fake(program):
        return cast(TemplateProcess, _FakeWorkerTemplate(_shared, program[-1]))
    return cast(TemplateProcess, _WorkerTemplate(_shared, program))


@contextmanager
def shared_template() -> Iterator[TemplateProcess | None]:
    """Run a template for the block. None with a GPU."""
    # A forked process cannot use a GPU if its library was loaded before the fork.
    if not is_supported() or torch.cuda.is_available():
        yield None
        return
    with closing(_SharedTemplate()) as template:
        yield template


@contextmanager
def forked_workers(template: TemplateProcess | None) -> Iterator[None]:
    """Let workers of `running` and of `LocalCluster` fork from the template within the block."""
    global _shared

    def template_of_spec(self: LocalPlacer, spec: ProcessSpec) -> TemplateProcess | None:
        return template_for(spec.args, self._worker_program, spec.env)

    with pytest.MonkeyPatch.context() as patch:
        _shared = template
        patch.setattr(LocalPlacer, "_template_for", template_of_spec)
        try:
            yield
        finally:
            _shared = None
