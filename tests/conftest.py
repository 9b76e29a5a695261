"""For all tests."""

from hypothesis import HealthCheck, settings

# Nothing is said here about time: machines are shared.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
