"""For all tests."""

import asyncio
import atexit
import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx._transports.default
import pytest
import uvicorn.server
from hypothesis import HealthCheck, settings

from splitserve.core.environment import cache_dir
from splitserve.transfer.transports import missing
from support.process_settings import restored_settings

if TYPE_CHECKING:
    from splitserve.process.template import TemplateProcess
    from support.draft_heads import TaughtModel

# No time limits here: machines are shared.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Each process of xdist computes on one thread: more threads than cores wait for each other, and threads that wait spin.
# Nothing above imports torch, which reads this once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU kernels of Triton run in its interpreter. Triton reads this once, on import.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start import `support`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

# Packed weights and fingerprints of tests are in a cache of their own, which xdist's workers and other processes
# inherit. Converted models are in the user's cache.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = Path(tempfile.mkdtemp(prefix="splitserve-tests-"))
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    (cache_dir() / "models").mkdir(parents=True, exist_ok=True)
    (_cache / "models").symlink_to((cache_dir() / "models").absolute())
    os.environ["SPLITSERVE_CACHE"] = str(_cache)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of a transport that is missing are skipped. Where it must not be, nothing is run without it."""
    for backend in os.environ.get("SPLITSERVE_REQUIRED_TRANSPORTS", "").split():
        if problem := missing(backend):
            raise pytest.UsageError(f"SPLITSERVE_REQUIRED_TRANSPORTS: {problem}")


@pytest.fixture(scope="session", autouse=True)
def modules_stay() -> Iterator[None]:
    """Let collections skip modules and tests, which are most objects: each load of a model collects garbage."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_end_at_once() -> Iterator[None]:
    """uvicorn looks for its end ten times a second, and sleeps as long in each phase of it. Tests start many."""

    async def wait_shortly(_: float) -> None:
        # A connection that was accepted meanwhile needs some turns of the loop, however long they take.
        for _ in range(5):
            await asyncio.sleep(0.002)

    quick = SimpleNamespace(**vars(asyncio) | {"sleep": wait_shortly})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", quick)
        yield


@pytest.fixture(scope="session", autouse=True)
def clients_share_certificates() -> Iterator[None]:
    """Load the certificates of public hosts once: each client of httpx would load them, for 25 ms of CPU time."""
    load = httpx._transports.default.create_ssl_context
    shared = functools.cache(load)
    with pytest.MonkeyPatch.context() as patch:
        name = "httpx._transports.default.create_ssl_context"
        patch.setattr(name, lambda **given: (shared if given["verify"] is True else load)(**given))
        yield


@pytest.fixture(autouse=True)
def settings_of_this_process() -> Iterator[None]:
    with restored_settings():
        yield


@pytest.fixture(scope="session")
def taught_with_eagle3() -> "TaughtModel":
    # Imported here, because most tests need no model.
    from support.draft_heads import taught_once, taught_with_eagle3

    return taught_once(cache_dir() / "eagle3", taught_with_eagle3)


@pytest.fixture(scope="session")
def taught_with_mtp() -> "TaughtModel":
    from support.draft_heads import taught_once, taught_with_mtp

    return taught_once(cache_dir() / "mtp", taught_with_mtp)


@pytest.fixture(scope="session")
def worker_template() -> "Iterator[TemplateProcess | None]":
    from support.worker_template import shared_template

    with shared_template() as template:
        yield template


@pytest.fixture(scope="module")
def workers_fork(worker_template: "TemplateProcess | None") -> Iterator[None]:
    """Let the workers of a module's tests fork from a process with all imports."""
    from support.worker_template import forked_workers

    with forked_workers(worker_template):
        yield
