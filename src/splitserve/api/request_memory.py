"""Memory that requests may take in one process, estimated from the size of their bodies."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Gauge

from splitserve.core.config import LimitsConfig

# Bytes of memory for each byte of a body while it is parsed and validated. The worst JSON is many empty objects: 3
# bytes of text become 72 of dict and list entry. Plain text takes 3 for each byte.
PARSED_FACTOR = 24


class RequestMemory:
    """Account of the bytes reserved by requests. `max_bytes`: bound of their sum."""

    def __init__(self, max_bytes: int = LimitsConfig().max_request_memory) -> None:
        self.max_bytes = max_bytes
        self.reserved = 0

    def export(self, registry: CollectorRegistry, prefix: str) -> None:
        """Add the account to the metrics of a registry."""
        reserved = Gauge(f"{prefix}request_memory_bytes", "Memory reserved by requests, bytes.", registry=registry)
        reserved.set_function(lambda: self.reserved)
        bound = Gauge(f"{prefix}request_memory_max_bytes", "Bound of that memory, bytes.", registry=registry)
        bound.set(self.max_bytes)


class Reservation:
    """Bytes reserved by one request, none at first. Use as a context manager: it releases what is still reserved."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def resize(self, num_bytes: int) -> bool:
        """Change the reservation to this many bytes. Return False, and change nothing, if it exceeds the bound.

        The only request is always admitted, so that a small bound cannot reject every request.
        """
        memory = self._memory
        others = memory.reserved - self._num_bytes
        if num_bytes > self._num_bytes and others and others + num_bytes > memory.max_bytes:
            return False
        memory.reserved = others + num_bytes
        self._num_bytes = num_bytes
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resize(0)
