"""Between the record of what is cached and the publisher that tells of it. Used by the scheduler's thread alone."""

from __future__ import annotations

import time

import msgspec

from splitserve.cache.block_record import BlockRecord
from splitserve.events.publisher import EventPublisher, NullEventPublisher
from splitserve.events.schema import IndexSnapshot


class KVEventFeed:
    """`record`: None where nobody is told; then it costs nothing, and there is nothing to tell."""

    def __init__(self, record: BlockRecord | None = None, publisher: EventPublisher | None = None) -> None:
        self._record = record
        self._publisher = publisher or NullEventPublisher()

    def publish(self) -> None:
        """Tell what has changed since the last call, in one batch; once a turn. Never waits."""
        if self._record is not None:
            self._publisher.publish(self._record.take_news())

    def snapshot(self) -> bytes:
        """The whole index as JSON of an IndexSnapshot: an index that takes it goes on with the next batch."""
        self.publish()
        events = self._record.whole() if self._record is not None else []
        return msgspec.json.encode(IndexSnapshot(self._publisher.next_sequence, time.time(), events))
