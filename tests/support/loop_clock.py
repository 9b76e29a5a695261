"""Clock of an event loop that a test advances, so that no timer of a test depends on the speed of the machine."""

from __future__ import annotations

import asyncio


def advance(seconds: float) -> None:
    """Let the running loop's clock jump. Timers that are due then run in the loop's next turn. Not for uvloop."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
