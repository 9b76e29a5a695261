"""The decode rank that a prefill worker without peers writes to: a sink, which keeps no byte (`transports/fake.py`)."""

from __future__ import annotations

from splitserve.core.request import RoomKey
from splitserve.transfer.outgoing import DecodePeer
from splitserve.transfer.pairing import overlap
from splitserve.transfer.transports.base import PeerAddress
from splitserve.transfer.wire import KVArgs, TransferInfo


def sink_peer(args: KVArgs, session: PeerAddress, now: float) -> DecodePeer:
    """Return a decode rank that is like this prefill rank, has no address, and is written to through `session`."""
    return DecodePeer(session, "", 0, args, overlap(args.layout, args.layout), num_targets=1, last_message_at=now)


def sink_announcement(args: KVArgs, session: PeerAddress, key: RoomKey, rid: str, num_tokens: int) -> TransferInfo:
    """Return the announcement of a room by the rank of `sink_peer`."""
    num_pages = -(-num_tokens // args.layout.page_size)
    return TransferInfo(
        session_id=session.session_id,
        key=key,
        attempt=0,
        rid=rid,
        pages=list(range(num_pages)),
        # The sink writes nothing, so the pages may be the same.
        window_pages=[0] * num_pages,
        metadata_index=0,
        num_tokens=num_tokens,
        num_held_tokens=0,
    )
