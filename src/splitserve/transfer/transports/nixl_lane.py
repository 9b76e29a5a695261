"""One sending agent of a connection with its current transfer. Used by one thread at a time."""

from __future__ import annotations

import contextlib
from typing import Any

from splitserve.transfer.copies import Copies
from splitserve.transfer.transports.memory import Memory
from splitserve.transfer.transports.nixl_requests import Requests


class Lane:
    """Owner of `agent`, which has `sources` registered. `metadata`: the peer's agent, which registered `targets`."""

    def __init__(self, agent: Any, metadata: bytes, sources: Memory, targets: Memory) -> None:
        self._agent = agent
        self._peer: str = agent.add_remote_agent(metadata)
        self.requests = Requests(agent, self._peer, sources, targets)
        self._under_way: Any = None

    def post(self, part: Copies, note: bytes) -> str:
        """Start to transfer a part made by `requests`. Return the library's state of it."""
        self._under_way = self.requests.make(part, note)
        state: str = self._agent.transfer(self._under_way)
        return state

    def state(self) -> str:
        """Return the state of the posted transfer. Without a thread of the agent, only this call advances it."""
        state: str = self._agent.check_xfer_state(self._under_way)
        return state

    def release(self) -> None:
        """Release the posted transfer, which has ended."""
        request, self._under_way = self._under_way, None
        if request is not None:
            request.release()

    def close(self) -> None:
        """Destroy the agent. On return, our memory is not read any more."""
        # Each call may fail if the peer or the request is broken. The agent is destroyed with all of them.
        for let_go in (self.release, self.requests.release, self._remove_peer):
            with contextlib.suppress(Exception):
                let_go()
        del self.requests, self._agent

    def _remove_peer(self) -> None:
        self._agent.remove_remote_agent(self._peer)
