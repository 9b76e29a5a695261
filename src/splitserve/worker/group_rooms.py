"""KV transfer of a worker that is sharded over ranks: a KVManager in each rank, and one view of all for the scheduler.

Each rank opens its own manager (`hand_over.py`). The driver's manager orders the transitions of a room on all ranks.
The followers' FollowerRooms execute them, in a thread beside the one that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from splitserve.core.config import DisaggregationConfig
from splitserve.engine.build import BuiltEngine
from splitserve.ranks.kv_follower import FollowerRooms
from splitserve.ranks.rank_channel import FollowerChannel, LinkThread
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.metadata import ReqToMetadataIdxAllocator
from splitserve.worker.hand_over import open_rank
from splitserve.worker.rank_group import DriverPlace, RankPlace


def open_hand_over(
    config: DisaggregationConfig,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: DriverPlace,
    on_change: Callable[[], None],
    closing: ExitStack,
) -> TransferKit:
    """Open the KV transfer of a prefill or decode worker; `closing` ends it: first the threads, last the transport.

    `on_change` is called from one of these threads when a room's state changed.
    """
    slots = ReqToMetadataIdxAllocator(config.num_metadata_slots)
    links = place.channel.links if place.channel else []
    own = open_rank(config, engine, bootstrap_url, place, on_change, closing, links)

    def tick() -> None:
        if own.manager.collect_reports():
            on_change()

    if links:
        thread = LinkThread(links, tick, place.end)
        closing.callback(thread.close)
        thread.start()
    return TransferKit(own.manager, own.metadata, slots)


def follow_rooms(
    config: DisaggregationConfig,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: RankPlace,
    channel: FollowerChannel,
    closing: ExitStack,
) -> None:
    """Execute the driver's orders for this follower's rooms, until `closing` ends it."""

    def tick() -> None:
        rooms.tick()

    thread = LinkThread([channel.link], tick, place.end)
    own = open_rank(config, engine, bootstrap_url, place, thread.wake, closing)
    rooms = FollowerRooms(own.manager, channel.link)
    closing.callback(thread.close)
    thread.start()
