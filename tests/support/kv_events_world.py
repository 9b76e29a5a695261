"""Worker on fakes that publishes its KV events over real sockets, and links to its subscribers that a test can cut.

The test runs each turn of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, Self

import msgspec

from splitserve.core.messages import FlushCacheRequest, GenerateRequest, KVIndexReply, KVIndexRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.observe.events.publisher import ZmqEventPublisher
from splitserve.observe.events.schema import BlockIndex, IndexSnapshot
from support.sim import ColocatedWorld

PAGE = 4
_ANY = "tcp://127.0.0.1:0"


class TcpRelay:
    """TCP port that forwards connections to an endpoint. `cut` closes them; later connections are forwarded again."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> bool:
        """Close all connections and drop the bytes in flight. Return whether there was a connection."""
        was_connected = self.is_connected()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        return was_connected

    def is_connected(self) -> bool:
        return any(not writer.is_closing() for writer in self._writers)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.transport.abort()


class PublishingSimWorker:
    """Null worker under random prompts with shared prefixes, and with fewer pages than they need."""

    def __init__(self, seed: int, *, is_overlapped: bool = False, **options: Any) -> None:
        """Start the worker. `options`: those of the publisher."""
        self.publisher = ZmqEventPublisher(0, _ANY, _ANY, **options)
        self._rng = random.Random(seed)
        late = self._rng if is_overlapped else None
        # One block has 32 bytes, so the host tier holds 500 pages.
        self.world = ColocatedWorld(
            num_pages=256, page_size=PAGE, prefix_host_memory=16_000, late_steps=late, publisher=self.publisher
        )
        self.num_stored = 0
        self._num_requests = self._num_calls = 0

    def work(self) -> None:
        """Run four requests from arrival to end."""
        for _ in range(4):
            self._num_requests += 1
            length = self._rng.randrange(40, 160)
            prompt = [self._rng.randrange(6)] * self._rng.randrange(30) + [
                self._rng.randrange(500) for _ in range(length)
            ]
            params = ResolvedSampling(max_new_tokens=4, temperature=0.0)
            self.world.submit(GenerateRequest(rid=f"r{self._num_requests}", prompt_ids=prompt, params=params))
            # At least these pages are new: only the prefix of a prompt is shared.
            self.num_stored += length // PAGE - 1
        self.world.run_until_idle()

    def flush(self) -> None:
        self.world.submit(FlushCacheRequest(call_id=0))
        self.world.run_until_idle()
        self.world.turn()

    async def snapshot(self) -> IndexSnapshot:
        self._num_calls += 1
        self.world.submit(KVIndexRequest(call_id=self._num_calls))
        self.world.turn()
        reply = self.world.replies.pop()
        assert isinstance(reply, KVIndexReply)
        assert reply.call_id == self._num_calls
        return msgspec.json.decode(reply.snapshot, type=IndexSnapshot)

    async def index(self) -> dict[int, frozenset[str]]:
        """Return the worker's own index: block hash -> media that hold the block."""
        index = BlockIndex()
        index.replace((await self.snapshot()).events)
        return index.blocks()
