"""For all tests."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from splitserve.engine.sources import cache_dir
from splitserve.transfer.transports import missing

# No time limits here: machines are shared.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

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
