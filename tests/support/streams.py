"""Streams that a test disturbs while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.tools.chaos.streams import StreamOutcome, StreamRequest, follow
from splitserve.tools.client import open_session


@dataclass
class WatchedOutcome(StreamOutcome):
    """Outcome that counts its events and reports each."""

    on_event: Callable[[], None] = lambda: None
    num_events: int = 0

    def take(self, data: dict[str, Any]) -> None:
        super().take(data)
        self.num_events += 1
        self.on_event()


def follow_all(
    url: str,
    requests: Mapping[int, StreamRequest] | Sequence[StreamRequest],
    *,
    timeout: float,
    disturb: Callable[[], None] | None = None,
    after: int = 0,
) -> dict[int, StreamOutcome]:
    """Run all requests at once to their ends. `disturb` is called when each has received `after` events.

    Raises ValueError if that never happens.
    """
    is_due = disturb is not None

    def on_event() -> None:
        nonlocal is_due
        if is_due and all(o.num_events >= after for o in outcomes.values()):
            is_due = False
            assert disturb is not None
            disturb()

    numbered = dict(requests.items() if isinstance(requests, Mapping) else enumerate(requests))
    outcomes = {i: WatchedOutcome(on_event=on_event) for i in numbered}

    async def run() -> None:
        async with open_session(timeout) as session:
            await asyncio.gather(*(follow(session, url, r, outcomes[i]) for i, r in numbered.items()))

    asyncio.run(run())
    if is_due:
        raise ValueError(f"no moment at which each of {len(outcomes)} streams had had {after} events")
    return dict(outcomes)
