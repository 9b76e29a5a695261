"""One sending agent of a connection and the transfer that is under way on it. Used by one thread at a time."""

from __future__ import annotations

import contextlib
from typing import Any

from splitserve.disaggregation.copies import Copies
from splitserve.disaggregation.transports.memory import Memory
from splitserve.disaggregation.transports.nixl_requests import Requests


class Lane:
    """Owns `agent`, which has `sources` registered. `metadata`: of the peer's agent, whose memory `targets` is."""

    def __init__(self, agent: Any, metadata: bytes, sources: Memory, targets: Memory) -> None:
        self._agent = agent
        self._peer: str = agent.add_remote_agent(metadata)
        self.requests = Requests(agent, self._peer, sources, targets)
        self._under_way: Any = None

    def post(self, part: Copies, note: bytes) -> str:
        """Begin to transfer what `requests` has cut off. Returns the library's word for its state."""
        self._under_way = self.requests.make(part, note)
        state: str = self._agent.transfer(self._under_way)
        return state

    def state(self) -> str:
        """Of what was posted. Without a thread of the agent this call is what lets it go on."""
        state: str = self._agent.check_xfer_state(self._under_way)
        return state

    def release(self) -> None:
        """What was posted is over."""
        request, self._under_way = self._under_way, None
        if request is not None:
            request.release()

    def close(self) -> None:
        """When this returns, our memory is not read any more."""
        # Each of these fails where the peer, or the request, is in a bad way; the agent goes with all of them.
        for let_go in (self.release, self.requests.release, self._remove_peer):
            with contextlib.suppress(Exception):
                let_go()
        del self.requests, self._agent

    def _remove_peer(self) -> None:
        self._agent.remove_remote_agent(self._peer)
