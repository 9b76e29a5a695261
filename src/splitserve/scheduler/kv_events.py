"""Feed from the record of cached blocks to the event publisher. Used by the scheduler's thread alone."""

from __future__ import annotations

import time

import msgspec

from splitserve.cache.block_record import BlockRecord
from splitserve.observe.events.publisher import EventPublisher, NullEventPublisher
from splitserve.observe.events.schema import IndexSnapshot


class KVEventFeed:
    """Publisher of changes of the cache. `record`: None if there is no subscriber; then nothing is recorded or sent."""

    def __init__(self, record: BlockRecord | None = None, publisher: EventPublisher | None = None) -> None:
        self._record = record
        self._publisher = publisher or NullEventPublisher()

    def publish(self) -> None:
        """Publish what has changed since the last call, in one batch; called once a turn. Never waits."""
        if self._record is not None:
            self._publisher.publish(self._record.take_news())

    def snapshot(self) -> bytes:
        """Return the whole index as JSON of an IndexSnapshot. An index that loads it continues with the next batch."""
        self.publish()
        events = self._record.whole() if self._record is not None else []
        return msgspec.json.encode(IndexSnapshot(self._publisher.next_sequence, time.time(), events))
