"""The hand-over of a worker whose model is cut over ranks: a KVManager in each, and one view of all for the scheduler.

Each rank opens its own (`hand_over.py`). The driver's GroupManager orders what happens to a room on all of them, and
the followers' FollowerRooms carry it out, in a thread beside the one that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from splitserve.config import DisaggregationConfig
from splitserve.disaggregation.follower import FollowerRooms
from splitserve.disaggregation.group import GroupManager
from splitserve.disaggregation.kit import HandOverKit
from splitserve.disaggregation.metadata import ReqToMetadataIdxAllocator
from splitserve.engine.build import BuiltEngine
from splitserve.launch.hand_over import open_rank
from splitserve.launch.rank_channel import FollowerChannel, LinkThread
from splitserve.launch.rank_group import DriverPlace, RankPlace


def open_hand_over(
    config: DisaggregationConfig,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: DriverPlace,
    on_change: Callable[[], None],
    closing: ExitStack,
) -> HandOverKit:
    """Open the hand-over of a prefill or decode worker; `closing` ends it: first the threads, last the transport.

    `on_change` is called from a thread of theirs when a room's state changed.
    """
    slots = ReqToMetadataIdxAllocator(config.num_metadata_slots)
    channel = place.channel
    if channel is None:
        alone = open_rank(config, engine, bootstrap_url, place, on_change, closing)
        return HandOverKit(alone.manager, alone.metadata, slots)

    def tick() -> None:
        if group.tick():
            on_change()

    def local_change() -> None:
        on_change()
        thread.wake()

    thread = LinkThread(channel.links, tick, place.end)
    own = open_rank(config, engine, bootstrap_url, place, local_change, closing)
    group = GroupManager(own.manager, place.rank, channel.links)
    closing.callback(thread.close)
    thread.start()
    return HandOverKit(group, own.metadata, slots)


def follow_rooms(
    config: DisaggregationConfig,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: RankPlace,
    channel: FollowerChannel,
    closing: ExitStack,
) -> None:
    """Have this follower's end of every room move as the driver orders, until `closing` ends it."""

    def tick() -> None:
        rooms.tick()

    thread = LinkThread([channel.link], tick, place.end)
    own = open_rank(config, engine, bootstrap_url, place, thread.wake, closing)
    rooms = FollowerRooms(own.manager, channel.link)
    closing.callback(thread.close)
    thread.start()
