"""KV transfers without a peer: rooms at FAKE_BOOTSTRAP_HOST, for warm-up and health generation.

They pass through the same states as real ones, at once, and no byte is sent. The receiver writes a metadata row itself,
so that decode continues from token 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.core.errors import SplitserveError
from splitserve.core.messages import TransferStats
from splitserve.core.request import RoomKey
from splitserve.transfer.metadata import MetadataBuffers, MetadataRow
from splitserve.transfer.room import Context, Room, abort_error
from splitserve.transfer.state import KVEvent, KVPoll

FAKE_BOOTSTRAP_HOST = "2.2.2.2"


class _FakeRoom(Room):
    # A fake room has no peer to distinguish attempts for.
    attempt = 0

    def __init__(self, context: Context, key: RoomKey, rid: str) -> None:
        super().__init__(context, key, rid)
        self.advance(KVEvent.PAIRED)

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        self.give_up(abort_error(self.rid, self.key, reason, status_code))

    def give_up(self, error: SplitserveError) -> None:
        self.fail(error)

    def quiescent(self) -> bool:
        return True

    def clear(self) -> None:
        """Do nothing: no table contains the room."""


class FakeKVSender(_FakeRoom):
    def send(
        self,
        pages: Sequence[int],
        *,
        is_last: bool,
        metadata_index: int | None = None,
        window_pages: Sequence[int] = (),
    ) -> None:
        if self.poll() is KVPoll.WAITING_FOR_INPUT:
            self.advance(KVEvent.STARTED)
        if is_last and self.poll() is KVPoll.TRANSFERRING:
            self.advance(KVEvent.COMPLETED)

    def stats(self) -> TransferStats | None:
        return TransferStats(num_bytes=0, seconds=0.0, exposed_seconds=0.0) if self.poll() is KVPoll.SUCCESS else None


class FakeKVReceiver(_FakeRoom):
    def __init__(self, context: Context, key: RoomKey, rid: str, metadata: MetadataBuffers) -> None:
        super().__init__(context, key, rid)
        self._metadata = metadata

    def init(
        self,
        pages: Sequence[int],
        metadata_index: int,
        *,
        num_tokens: int,
        num_held_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        window_pages: Sequence[int] = (),
    ) -> None:
        if self.is_final:
            return
        if self.context.args.rank.is_driver:
            self._metadata.set_buf(metadata_index, MetadataRow(key=self.key, output_id=0))
        self.advance(KVEvent.STARTED)
        self.advance(KVEvent.COMPLETED)
