"""Scripted worker that publishes real KV events of a cache. The test fills the cache."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from splitserve.cache.kv_events import block_hash, page_names
from splitserve.cache.prefix import split_pages
from splitserve.observe.events.publisher import ZmqEventPublisher
from splitserve.observe.events.schema import BlockIndex, BlockStored, IndexSnapshot
from support.router_world import FakeWorker

# Tokens per block.
SIZE = 4
_ANY = "tcp://127.0.0.1:0"


class PublishingWorker:
    """Worker that answers every request at once, and publishes the blocks that `tell` puts into its cache.

    `folder`: tokenizer path that it reports. Empty: none.
    """

    def __init__(self, folder: str = "", *, tells: bool = True) -> None:
        self.folder = folder
        self.publisher = ZmqEventPublisher(0, _ANY, _ANY) if tells else None
        self.index = BlockIndex()
        self.fake: FakeWorker | None = None

    @property
    def url(self) -> str:
        assert self.fake is not None
        return self.fake.url

    @property
    def num_served(self) -> int:
        assert self.fake is not None
        return self.fake.paths.count("/generate")

    def tell(self, *events: Any) -> None:
        assert self.publisher is not None
        for event in events:
            self.index.apply(event)
        self.publisher.publish(events)

    def hold(self, tokens: list[int]) -> None:
        names = chain(tokens)
        self.tell(BlockStored(names, None, tokens[: len(names) * SIZE], SIZE))

    def restart(self) -> None:
        """Restart with an empty cache and other ports."""
        assert self.publisher is not None
        self.publisher.shutdown()
        self.publisher, self.index = ZmqEventPublisher(0, _ANY, _ANY), BlockIndex()

    async def handle(self, request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        answers = {"/server_info": self._info, "/kv_index": self._snapshot, "/model_info": self._model}
        answer = answers.get(request.path, lambda: {"text": "ok"})()
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def _info(self) -> Any:
        if self.publisher is None:
            return {"kv_events": None}
        place = {"dp_rank": 0, "endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        return {"kv_events": {"topic": "", "block_size": SIZE, "publishers": [place]}}

    def _snapshot(self) -> Any:
        assert self.publisher is not None
        return IndexSnapshot(self.publisher.next_sequence, time.time(), list(self.index.as_events()))

    def _model(self) -> Any:
        return {"tokenizer_path": self.folder}


def chain(tokens: list[int]) -> list[int]:
    return [block_hash(name) for name in page_names(split_pages(tokens, SIZE))]
