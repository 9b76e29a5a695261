"""Subscribers of others read our events: written on msgspec structs of the public formats alone, and on pyzmq.

Nothing of splitserve.observe.events is used to read. The structs are those that vLLM and SGLang declare, by generation,
field by field in their order; what has no default there must be on the wire. A decoder of such a type refuses what
does not fit.
"""

import asyncio
import contextlib
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from splitserve.observe.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from support.kv_events_world import PublishingSimWorker, TcpRelay

DEADLINE = 60.0
END = (-1).to_bytes(8, "big", signed=True)
Hash = int | bytes


def batches_of(events: type[msgspec.Struct], stored: Any, removed: Any, cleared: Any, rank: str | None) -> Any:
    """The type of a batch: an array of its time, its events and, in all but the oldest, the rank."""
    fields: list[Any] = [("ts", float), ("events", list[stored | removed | cleared])]
    if rank is not None:
        fields.append((rank, int | None, None))
    return msgspec.defstruct("EventBatch", fields, array_like=True, omit_defaults=True, gc=False)


def vllm(*, array_like: bool) -> Any:
    """As in 0.28, but that arrays were before maps (0.26 has these)."""

    class Event(msgspec.Struct, array_like=array_like, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[Hash]
        parent_block_hash: Hash | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None
        locality: str | None = None

    class BlockRemoved(Event):
        block_hashes: list[Hash]
        medium: str | None
        group_idx: int | None = None
        locality: str | None = None

    class AllBlocksCleared(Event):
        pass

    return batches_of(Event, BlockStored, BlockRemoved, AllBlocksCleared, "data_parallel_rank")


def sglang(*, array_like: bool) -> Any:
    class Event(msgspec.Struct, array_like=array_like, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None = None
        cache_salt: str | None = None
        session_id: str | None = None

    class BlockRemoved(Event):
        block_hashes: list[int]
        medium: str | None = None

    class AllBlocksCleared(Event):
        pass

    return batches_of(Event, BlockStored, BlockRemoved, AllBlocksCleared, "attn_dp_rank")


def oldest() -> Any:
    """Of 2025, before there were media: it sees every block, but not where it lies."""

    class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class BlockRemoved(Event):
        block_hashes: list[int]

    class AllBlocksCleared(Event):
        pass

    return batches_of(Event, BlockStored, BlockRemoved, AllBlocksCleared, None)


READERS = {
    "vllm-maps": (vllm(array_like=False), False),
    "vllm-arrays": (vllm(array_like=True), True),
    "sglang-maps": (sglang(array_like=False), False),
    "sglang-arrays": (sglang(array_like=True), True),
    "oldest-arrays": (oldest(), True),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_generation_of_readers_decodes_every_event(reader):
    batch_type, as_arrays = READERS[reader]
    sent = EventBatch(
        1.5,
        [
            BlockStored([1, -(2**63)], None, [5, 6, 7, 8], 2),
            BlockStored([3], -(2**63), [9, 10], 2, medium="CPU_PINNED"),
            BlockRemoved([1, 3], medium="CPU_PINNED"),
            AllBlocksCleared(),
        ],
        3,
    )
    batch = msgspec.msgpack.decode(encode(sent, as_arrays=as_arrays), type=batch_type)
    first, second, removed, cleared = batch.events
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([1, -(2**63)], None, [5, 6, 7, 8])
    assert (second.block_hashes, second.parent_block_hash, second.block_size) == ([3], -(2**63), 2)
    assert (second.lora_id, removed.block_hashes) == (None, [1, 3])
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert batch.ts == 1.5
    if reader != "oldest-arrays":
        assert (first.medium, second.medium, removed.medium) == ("GPU", "CPU_PINNED", "CPU_PINNED")
        assert getattr(batch, batch_type.__struct_fields__[2]) == 3
    # Fields that we do not send have the reader's default: none of our fields takes their place.
    rest = set(type(first).__struct_fields__) - set(BlockStored.__struct_fields__)
    assert [name for name in rest if getattr(first, name) is not None] == []


class PublicSubscriber:
    """Follows one publisher from its first batch on: SUB, and DEALER for what it missed."""

    def __init__(self, context: zmq.asyncio.Context, batch_type: Any, endpoint: str, replay_endpoint: str) -> None:
        self.media: dict[int, set[str]] = {}
        self.next_number = 0
        self.num_replayed = 0
        self._decoder = msgspec.msgpack.Decoder(batch_type)
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def blocks(self) -> dict[int, frozenset[str]]:
        return {name: frozenset(media) for name, media in self.media.items()}

    async def run(self) -> None:
        while True:
            if await self._sub.poll(200):
                _, number, payload = await self._sub.recv_multipart()
                if int.from_bytes(number, "big") > self.next_number:
                    await self._request_again()
                self._take(number, payload)
            else:
                await self._request_again()

    async def _request_again(self) -> None:
        """Request all batches from the next number on. A link that is cut ends the wait; the next call retries."""
        await self._replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while await self._replay.poll(1000):
            # In SGLang's releases [number, payload], in vLLM's with the topic before them.
            *_, number, payload = await self._replay.recv_multipart()
            if number == END:
                return
            self.num_replayed += self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> bool:
        if int.from_bytes(number, "big") != self.next_number:
            return False
        self.next_number += 1
        for event in self._decoder.decode(payload).events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.media.clear()
            for name in getattr(event, "block_hashes", ()):
                if kind == "BlockStored":
                    self.media.setdefault(name, set()).add(event.medium)
                else:
                    self.media[name].remove(event.medium)
                    if not self.media[name]:
                        del self.media[name]
        return True


@contextlib.asynccontextmanager
async def following(worker: PublishingSimWorker, batch_type: Any):
    """A subscriber through two links, and the one that carries its events."""
    async with TcpRelay(worker.publisher.endpoint) as events, TcpRelay(worker.publisher.replay_endpoint) as replay:
        with zmq.asyncio.Context() as context:
            subscriber = PublicSubscriber(context, batch_type, events.endpoint, replay.endpoint)
            task = asyncio.create_task(subscriber.run())
            try:
                yield subscriber, events, task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                context.destroy(linger=0)


async def until(is_true, task):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert not task.done(), task.exception()
        assert time.monotonic() < limit, "it never became true"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("reader", "options"),
    [("vllm-maps", {}), ("vllm-arrays", {"as_arrays": True}), ("sglang-maps", {"replay_topic": False})],
)
async def test_a_public_subscriber_ends_with_the_workers_index(reader, options):
    worker = PublishingSimWorker(11, **options)
    try:
        async with following(worker, READERS[reader][0]) as (subscriber, link, task):
            for target in range(2000, 12_000, 2000):
                while worker.num_stored < target:
                    worker.work()
                    await asyncio.sleep(0)
                await until(link.is_connected, task)
                link.cut()
                # Published while it is away.
                worker.work()
            held = await worker.index()
            await until(lambda: subscriber.next_number == worker.publisher.next_sequence, task)
            assert subscriber.blocks() == held
            assert {medium for media in held.values() for medium in media} == {"GPU", "CPU_PINNED"}
            assert len(held) < 256 + 500 < worker.num_stored
            assert subscriber.num_replayed > 0
            worker.flush()
            await until(lambda: not subscriber.media, task)
    finally:
        worker.publisher.shutdown()
