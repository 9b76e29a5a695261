"""Control plane of tests: frames in lists instead of sockets, and a directory with entries that the test writes."""

from __future__ import annotations

from collections import deque

from splitserve.transfer.peers import BootstrapAddress, LookupFailure
from splitserve.transfer.wire import PrefillInfo


class Wires:
    """Carrier of frames between channels. Delivers at once or, in step mode, when the test calls `deliver`."""

    def __init__(self, *, step: bool = False) -> None:
        self.step = step
        self.inboxes: dict[str, deque[bytes]] = {}
        # Frames in flight, in order, by (from, to).
        self.under_way: dict[tuple[str, str], deque[bytes]] = {}

    def busy(self) -> list[tuple[str, str]]:
        return [pair for pair, frames in self.under_way.items() if frames]

    def deliver(self, pair: tuple[str, str], *, drop: bool = False) -> None:
        frame = self.under_way[pair].popleft()
        inbox = self.inboxes.get(pair[1])
        if inbox is not None and not drop:
            inbox.append(frame)

    def duplicate(self, pair: tuple[str, str], place: int) -> None:
        """Insert a second copy of the next frame, behind `place` other frames."""
        frames = self.under_way[pair]
        frames.insert(1 + place % len(frames), frames[0])

    def overtake(self, pair: tuple[str, str], place: int) -> None:
        """Move a later frame to the front."""
        frames = self.under_way[pair]
        frame = frames[place % len(frames)]
        del frames[place % len(frames)]
        frames.appendleft(frame)


class Channel:
    """ControlChannel over `Wires`."""

    def __init__(self, wires: Wires, address: str) -> None:
        self.wires = wires
        self.address = address
        wires.inboxes[address] = deque()

    def send(self, address: str, frame: bytes) -> None:
        self.wires.under_way.setdefault((self.address, address), deque()).append(frame)
        if not self.wires.step:
            self.wires.deliver((self.address, address))

    def receive(self) -> list[bytes]:
        inbox = self.wires.inboxes[self.address]
        frames = list(inbox)
        inbox.clear()
        return frames

    def forget(self, address: str) -> None:
        """Do nothing: there is nothing to free."""


class FakeDirectory:
    """Directory with entries that the test writes."""

    def __init__(self) -> None:
        self.entries: dict[BootstrapAddress, list[PrefillInfo] | LookupFailure] = {}
        self.requests: list[BootstrapAddress] = []
        self._waiting: set[BootstrapAddress] = set()

    def copy(self) -> FakeDirectory:
        """Return a directory with requests of its own that shares these entries."""
        other = FakeDirectory()
        other.entries = self.entries
        return other

    def request(self, address: BootstrapAddress, timeout: float) -> None:
        self.requests.append(address)
        self._waiting.add(address)

    def result(self, address: BootstrapAddress) -> list[PrefillInfo] | LookupFailure | None:
        if address in self._waiting and address in self.entries:
            self._waiting.discard(address)
            return self.entries[address]
        return None
