"""One worker as the router knows it: where it is, what it does, whether it answers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from splitserve.core.request import DisaggregationMode


@dataclass(slots=True, eq=False)
class Worker:
    url: str
    mode: DisaggregationMode
    # Prefill: port of its bootstrap server; None: the workers' own option counts.
    bootstrap_port: int | None = None
    # Given on the command line: never forgotten. A registered one is, when it stays away.
    is_static: bool = False
    # False from a failed connection or health check until the next check that succeeds.
    healthy: bool = True
    # Clock time of the first failure in a row; None while healthy.
    unhealthy_since: float | None = None
    # Requests this router has under way there.
    num_running: int = 0

    @property
    def host(self) -> str:
        """Host name alone: what the other side of a pair connects to for the rendezvous."""
        return urlsplit(self.url).hostname or ""

    def mark_healthy(self) -> None:
        self.healthy = True
        self.unhealthy_since = None

    def mark_unhealthy(self, now: float) -> None:
        self.healthy = False
        if self.unhealthy_since is None:
            self.unhealthy_since = now


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of one request."""

    prefill: Worker
    decode: Worker
