"""Discovery of a worker's KV events by its URL, and subscription to one of its ranks.

1. `/server_info` has the publisher of each data parallel rank (`find_publishers`).
2. `/kv_index` returns the whole index of a rank (`load_index`): at startup, and if a replay is not enough.

A publisher that is bound to all addresses is reached at the host name of the worker's URL.
"""

from __future__ import annotations

import functools
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from splitserve.observe.events.schema import IndexSnapshot
from splitserve.observe.events.subscriber import KVEventSubscriber

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class RankPublisher(msgspec.Struct, frozen=True):
    """Addresses of one rank's events."""

    dp_rank: int
    # Empty: the publisher connects to its subscribers.
    endpoint: str
    # Empty: there is no replay.
    replay_endpoint: str = ""


class PublisherInfo(msgspec.Struct, frozen=True):
    """Field `kv_events` of `/server_info`. Other keys are for readers of the public format."""

    topic: str
    # Tokens per block.
    block_size: int
    # Publishers by rank.
    publishers: list[RankPublisher]


class _ServerInfo(msgspec.Struct, frozen=True):
    kv_events: PublisherInfo | None = None


async def find_publishers(session: aiohttp.ClientSession, url: str) -> PublisherInfo | None:
    """Return the publishers of a worker. None: it publishes nothing, or connects to its subscribers.

    Raises OSError if it cannot be reached or its answer cannot be parsed.
    """
    info = (await _get(session, f"{url}/server_info", _ServerInfo)).kv_events
    # A publisher that connects to its subscribers has no address to subscribe to.
    if info is None or not info.publishers or not all(publisher.endpoint for publisher in info.publishers):
        return None
    host = urlsplit(url).netloc.rpartition("@")[2].removesuffix(f":{urlsplit(url).port}")
    publishers = [
        RankPublisher(
            p.dp_rank, p.endpoint.replace("//*:", f"//{host}:"), p.replay_endpoint.replace("//*:", f"//{host}:")
        )
        for p in sorted(info.publishers, key=lambda p: p.dp_rank)
    ]
    return msgspec.structs.replace(info, publishers=publishers)


async def load_index(session: aiohttp.ClientSession, url: str, dp_rank: int) -> IndexSnapshot:
    """Return all blocks that this rank holds.

    Raises OSError if the worker cannot be reached or its answer cannot be parsed.
    """
    return await _get(session, f"{url}/kv_index?dp_rank={dp_rank}", IndexSnapshot)


def follow(session: aiohttp.ClientSession, url: str, info: PublisherInfo, dp_rank: int) -> KVEventSubscriber:
    """Return a subscriber to one rank of a worker; its caller runs it."""
    publisher = info.publishers[dp_rank]
    return KVEventSubscriber(
        publisher.endpoint,
        publisher.replay_endpoint,
        info.topic,
        functools.partial(load_index, session, url, dp_rank),
    )


async def _get(session: aiohttp.ClientSession, url: str, form: type[T]) -> T:
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=form)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise OSError(f"{url}: {error or 'no answer in time'}") from error
