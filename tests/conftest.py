"""For all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from splitserve.transfer.transports import missing

# No time limits here: machines are shared.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Processes that tests start import `support`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def pytest_configure(config: pytest.Config) -> None:
    """Tests of a transport that is missing are skipped. Where it must not be, nothing is run without it."""
    for backend in os.environ.get("SPLITSERVE_REQUIRED_TRANSPORTS", "").split():
        if problem := missing(backend):
            raise pytest.UsageError(f"SPLITSERVE_REQUIRED_TRANSPORTS: {problem}")
