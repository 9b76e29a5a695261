"""Keeps what the router knows of its workers' prefix caches, by their KV events. One task for each worker.

1. Ask the worker where its events are. It cannot say yet: again in a moment. It tells none: by load alone, and asked
   again from time to time, for it may be restarted.
2. Follow each data parallel rank: load its index, apply its events, heal gaps (`events/subscriber.py`).
3. Ask again from time to time. Other addresses, or a subscription that failed: begin anew.
4. The worker leaves: what was known of it is forgotten.

Only workers of whom somebody wants to know it are followed. It does not know what is made of it.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from splitserve.events.discovery import PublisherInfo, find_publishers, follow
from splitserve.router.addresses import connector
from splitserve.router.failure import UpstreamError
from splitserve.router.prefixes import CachedPrefixes
from splitserve.router.prompts import PromptReader
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.watches import Watches
from splitserve.router.worker import Worker

logger = logging.getLogger(__name__)

# Intervals between two looks whether a worker's events are where they were: its answer costs its scheduler some work.
_LOOK_EVERY = 5


class _ModelInfo(msgspec.Struct, frozen=True):
    tokenizer_path: str = ""


class CacheFollower:
    """`model`: whose tokenizer reads the prompts; None: the workers' own. `interval`: seconds."""

    def __init__(
        self,
        registry: WorkerRegistry,
        upstream: Upstream,
        prompts: PromptReader,
        model: str | None,
        interval: float,
    ) -> None:
        self._registry = registry
        self._upstream = upstream
        self._prompts = prompts
        self._model = model
        self._interval = interval

    async def run(self) -> None:
        """For ever; cancel it. At once over where nobody wants to know."""
        if not self._registry.followed_modes:
            return
        async with aiohttp.ClientSession(
            headers=self._upstream.key_header, connector=connector(None, self._upstream.tls)
        ) as session:
            watches = Watches(lambda worker: self._watch(session, worker))
            try:
                if self._model is not None:
                    await self._prompts.load(self._model)
                while True:
                    modes = self._registry.followed_modes
                    await watches.update(w for w in self._registry.all() if w.mode in modes)
                    await asyncio.sleep(self._interval)
            finally:
                await watches.close()

    async def _watch(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        is_told_of = False
        while True:
            try:
                info = await find_publishers(session, worker.url)
            except OSError as error:
                logger.debug("worker url=%s cannot be asked for its KV events: %s", worker.url, error)
                await asyncio.sleep(self._interval)
                continue
            if info is not None or self._registry.disaggregate_above is not None:
                # First: whose blocks are known, for him prompts are read.
                await self._learn_model(worker)
            if info is not None:
                await self._follow(session, worker, info)
                await asyncio.sleep(self._interval)
                continue
            if not is_told_of:
                is_told_of = True
                is_chosen_by_it = worker.mode in self._registry.cache_aware_modes
                effect = "cache_aware chooses it by load alone" if is_chosen_by_it else "no prompt counts as cached"
                logger.warning(
                    "worker url=%s tells no KV events, so %s: start it with --kv-events-config", worker.url, effect
                )
            await asyncio.sleep(_LOOK_EVERY * self._interval)

    async def _learn_model(self, worker: Worker) -> None:
        """Where none was named, or that one has no tokenizer."""
        if self._prompts.has_tokenizer:
            return
        try:
            _, answer, _ = await self._upstream.ask(worker, "GET", "/model_info")
            folder = msgspec.json.decode(answer, type=_ModelInfo).tokenizer_path
        except (UpstreamError, msgspec.MsgspecError):
            return
        if folder:
            await self._prompts.load_folder(folder)

    async def _follow(self, session: aiohttp.ClientSession, worker: Worker, info: PublisherInfo) -> None:
        """Until its events come from elsewhere, or cannot be followed."""
        subscribers = [follow(session, worker.url, info, p.dp_rank) for p in info.publishers]
        worker.prefixes = CachedPrefixes(info.block_size, [s.index for s in subscribers])
        tasks = [asyncio.create_task(s.run()) for s in subscribers]
        logger.info("worker url=%s KV events are followed ranks=%d", worker.url, len(tasks))
        try:
            while not await self._has_ended(tasks, worker):
                try:
                    if await find_publishers(session, worker.url) != info:
                        return
                except OSError:
                    # It may be busy. Who is gone for good leaves the registry.
                    continue
        finally:
            worker.prefixes = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _has_ended(self, tasks: list[asyncio.Task[None]], worker: Worker) -> bool:
        """Whether a subscription has, after the time between two looks."""
        done, _ = await asyncio.wait(tasks, timeout=_LOOK_EVERY * self._interval)
        for task in done:
            logger.warning("worker url=%s KV events cannot be followed: %r", worker.url, task.exception())
        return bool(done)
