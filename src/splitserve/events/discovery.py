"""Finds where a worker's KV events are, and follows one of its ranks: what a router needs to know of a URL.

1. `/server_info` names the publisher of each data parallel rank (`find_publishers`).
2. `/kv_index` answers the whole index of a rank (`load_index`): at the start, and where a replay is not enough.

A publisher bound to every address is reached by the name that the worker itself was reached by.
"""

from __future__ import annotations

import functools
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from splitserve.events.schema import IndexSnapshot
from splitserve.events.subscriber import KVEventSubscriber

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class RankPublisher(msgspec.Struct, frozen=True):
    """Where one rank's events are."""

    dp_rank: int
    # Empty: the publisher connects out.
    endpoint: str
    # Empty: there is no replay.
    replay_endpoint: str = ""


class PublisherInfo(msgspec.Struct, frozen=True):
    """What `/server_info` says under `kv_events`. Other keys are for readers of the public format."""

    topic: str
    # Tokens.
    block_size: int
    # By rank.
    publishers: list[RankPublisher]


class _ServerInfo(msgspec.Struct, frozen=True):
    kv_events: PublisherInfo | None = None


async def find_publishers(session: aiohttp.ClientSession, url: str) -> PublisherInfo | None:
    """None if the worker publishes nothing, or connects out to its subscribers.

    Raises OSError if it cannot be reached or its answer is not understood.
    """
    info = (await _get(session, f"{url}/server_info", _ServerInfo)).kv_events
    # A publisher that connects out has no address to subscribe to.
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
    """All that this rank holds. Raises OSError where the worker cannot be asked, or is not understood."""
    return await _get(session, f"{url}/kv_index?dp_rank={dp_rank}", IndexSnapshot)


def follow(session: aiohttp.ClientSession, url: str, info: PublisherInfo, dp_rank: int) -> KVEventSubscriber:
    """A subscriber to one rank of a worker; its caller runs it."""
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
