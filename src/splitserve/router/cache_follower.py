"""Task that follows the KV events of the workers, to track their prefix caches.

1. Request the address of the events from the worker. If it is not ready yet, retry soon. If it publishes none, route
   by load only and repeat the request periodically, as the worker may be restarted.
2. Follow each data parallel rank: load its index, apply its events, repair gaps (`observe/events/subscriber.py`).
3. Repeat the request periodically. If the addresses changed or a subscription failed, start again.
4. When the worker leaves, drop its cache indexes.

It follows only workers in the registry's `followed_modes`. This module does not use the result itself.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from splitserve.observe.events.subscriber import PublisherInfo, find_publishers, follow
from splitserve.router.prefixes import CachedPrefixes
from splitserve.router.prompts import PromptReader
from splitserve.router.register import connector
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream, UpstreamError
from splitserve.router.worker import Worker

logger = logging.getLogger(__name__)

# Number of intervals between two checks of the address of a worker's events. An answer costs its scheduler some work.
_LOOK_EVERY = 5


class _ModelInfo(msgspec.Struct, frozen=True):
    tokenizer_path: str = ""


class CacheFollower:
    """Follower of the workers' KV events. Run `watch` for each worker.

    `model`: its tokenizer reads the prompts. None: the workers' own. `interval`: seconds.
    """

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
        # Held while a tokenizer is loaded.
        self._loading = asyncio.Lock()

    async def watch(self, worker: Worker) -> None:
        """Follow the worker until cancelled. Return at once if no policy needs its caches."""
        if worker.mode not in self._registry.followed_modes:
            return
        has_warned = False
        async with aiohttp.ClientSession(
            headers=self._upstream.key_header, connector=connector(None, self._upstream.tls)
        ) as session:
            while True:
                try:
                    info = await find_publishers(session, worker.url)
                except OSError as error:
                    logger.debug("worker url=%s does not answer for its KV events: %s", worker.url, error)
                    await asyncio.sleep(self._interval)
                    continue
                if info is not None or self._registry.disaggregate_above is not None:
                    # The tokenizer is needed first, because prompts are read as soon as blocks are known.
                    await self._load_tokenizer(worker)
                if info is not None:
                    await self._follow(session, worker, info)
                    await asyncio.sleep(self._interval)
                    continue
                if not has_warned:
                    has_warned = True
                    is_chosen_by_it = worker.mode in self._registry.cache_aware_modes
                    effect = "cache_aware chooses it by load alone" if is_chosen_by_it else "no prompt counts as cached"
                    remedy = f"{effect}: start it with --kv-events-config"
                    logger.warning("worker url=%s publishes no KV events, so %s", worker.url, remedy)
                await asyncio.sleep(_LOOK_EVERY * self._interval)

    async def _load_tokenizer(self, worker: Worker) -> None:
        """Load the tokenizer of the given model, or the worker's if none was given or that has no tokenizer."""
        async with self._loading:
            model, self._model = self._model, None
            if model is not None:
                await self._prompts.load(model)
            if self._prompts.has_tokenizer:
                return
            try:
                _, answer, _ = await self._upstream.ask(worker, "GET", "/model_info")
                folder = msgspec.json.decode(answer, type=_ModelInfo).tokenizer_path
            except (UpstreamError, msgspec.MsgspecError):
                return
            if folder:
                await self._prompts.load(folder, is_local=True)

    async def _follow(self, session: aiohttp.ClientSession, worker: Worker, info: PublisherInfo) -> None:
        """Follow a worker until the address of its events changes, or a subscription fails."""
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
                    # The worker may be busy. A lost worker leaves the registry.
                    continue
        finally:
            worker.prefixes = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _has_ended(self, tasks: list[asyncio.Task[None]], worker: Worker) -> bool:
        """Wait between two checks. Return whether a subscription has ended."""
        done, _ = await asyncio.wait(tasks, timeout=_LOOK_EVERY * self._interval)
        for task in done:
            logger.warning("worker url=%s KV events cannot be followed: %r", worker.url, task.exception())
        return bool(done)
