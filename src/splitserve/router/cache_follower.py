"""What routing by cached prefixes needs: the blocks of a request's prompt, and the prefix caches of the workers.

Blocks are computed with the model's own tokenizer, as the workers do:
1. The tokenizer is that of `--model`, or of the first worker with a model folder that exists on this machine.
2. Prompts are tokenized and hashed in threads, one for each size of requests, so that long prompts do not delay short
   ones.
3. A prompt that cannot be read has no blocks. Its request is routed by load to a pair, and a worker reports the error.

Caches are known from the workers' KV events:
1. Request the address of the events from the worker. If it is not ready yet, retry soon. If it publishes none, route
   by load only and repeat the request periodically, as the worker may be restarted.
2. Follow each data parallel rank: load its index, apply its events, repair gaps (`observe/events/subscriber.py`).
3. Repeat the request periodically. If the addresses changed or a subscription failed, start again.
4. When the worker leaves, drop its cache indexes.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from splitserve.api.prompt_tokens import prompts_of
from splitserve.api.tokenizer import Tokenizer
from splitserve.cache.kv_events import block_hash, page_names
from splitserve.cache.prefix import split_pages
from splitserve.core.errors import UNREADABLE, InvalidRequestError, ModelLoadError
from splitserve.engine.sources import resolve_model
from splitserve.observe.events.subscriber import PublisherInfo, find_publishers, follow
from splitserve.process.threads import end_tasks
from splitserve.router.prefixes import CachedPrefixes, PromptBlocks
from splitserve.router.register import connector
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream, UpstreamError
from splitserve.router.worker import Worker

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Largest bodies of small and of medium requests, bytes. Each size class has one thread. The tokenizer releases the
# interpreter's lock; more threads would take cores from the event loop and other processes.
_SIZES = (8 << 10, 256 << 10)
_LARGE = len(_SIZES)
# Seconds a request waits for its blocks. After that it is routed without them.
READ_TIMEOUT = 5.0
# Number of intervals between two checks of the address of a worker's events. An answer costs its scheduler some work.
_LOOK_EVERY = 5


class PromptReader:
    """Reader of prompts.

    `max_tokens` returns the longest context served; longer prompts are not tokenized. `close` it after use.
    """

    def __init__(self, max_tokens: Callable[[], int | None] = lambda: None) -> None:
        self._max_tokens = max_tokens
        self.tokenizer: Tokenizer | None = None
        self._threads = [ThreadPoolExecutor(1, f"prompts-{size}") for size in ("small", "medium", "large")]
        self._has_warned = False

    async def load(self, model: str, *, is_local: bool = False) -> None:
        """Load the tokenizer of a model, and log if it has none. `model`: a folder or, unless `is_local`, a name."""

        def find() -> Path:
            if Path(model).is_dir():
                return Path(model)
            if is_local:
                raise ModelLoadError("the workers' folder is not on this machine: give the router --model")
            return resolve_model(model)

        try:
            self.tokenizer = await self._run(_LARGE, lambda: Tokenizer.load(find()))
            logger.info("tokenizer loaded model=%s", model)
        # The tokenizer's library raises plain exceptions, and a chat template errors of its own.
        except Exception as error:
            logger.warning("tokenizer of model %s cannot be loaded: %s", model, error)

    async def read(
        self, path: str, body: Mapping[str, Any], num_bytes: int, sizes: Collection[int], at_most: int | None = None
    ) -> Sequence[PromptBlocks]:
        """Return the first `at_most` prompts (None: all) of a body of `num_bytes`, by block `sizes`. Empty: unknown."""
        max_tokens = self._max_tokens()
        size = bisect_left(_SIZES, num_bytes)
        work = partial(hash_prompts, path, body, self.tokenizer, sizes, max_tokens, at_most)
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                found = await self._run(size, work)
        except InvalidRequestError:
            return ()
        except Exception as error:  # Templates and tokenizers raise any type, and a worker will report the error.
            logger.warning("prompt not read, its request goes by load: %s: %s", type(error).__name__, error)
            return ()
        if found is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "there is no tokenizer: policy cache_aware sends prompts in text by load, and --disaggregate-above all "
                "of them to pairs. Give the router --model"
            )
        return found or ()

    def close(self) -> None:
        """Stop the threads without waiting for running reads. Idempotent."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[size], work)


def hash_prompts(
    path: str,
    body: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    block_sizes: Collection[int],
    max_tokens: int | None = None,
    at_most: int | None = None,
) -> list[PromptBlocks] | None:
    """Return the blocks of the first `at_most` prompts. None: a tokenizer is needed. Raises InvalidRequestError."""
    prompts = prompts_of(path, body, tokenizer, max_tokens, at_most)
    if prompts is None:
        return None
    blocks = []
    for tokens in prompts:
        pages = {size: page_names(split_pages(tokens, size)) for size in set(block_sizes)}
        hashes = {size: [block_hash(name) for name in names] for size, names in pages.items()}
        blocks.append(PromptBlocks(len(tokens), hashes))
    return blocks


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
            if self._prompts.tokenizer is not None:
                return
            try:
                _, answer, _ = await self._upstream.ask(worker, "GET", "/model_info")
                folder = msgspec.json.decode(answer, type=_ModelInfo).tokenizer_path
            except (UpstreamError, *UNREADABLE):
                return
            if folder:
                await self._prompts.load(folder, is_local=True)

    async def _follow(self, session: aiohttp.ClientSession, worker: Worker, info: PublisherInfo) -> None:
        """Follow a worker until the address of its events changes, a subscription fails, or the worker is lost."""
        subscribers = [follow(session, worker.url, info, p.dp_rank) for p in info.publishers]
        indexes = [s.index for s in subscribers]
        known = worker.prefixes = CachedPrefixes(info.block_size, indexes, is_certain=not info.has_window_pages)
        tasks = [asyncio.create_task(s.run()) for s in subscribers]
        logger.info("worker url=%s KV events are followed ranks=%d", worker.url, len(tasks))
        try:
            while not await self._has_ended(tasks, worker) and worker.prefixes is known:
                try:
                    if await find_publishers(session, worker.url) != info:
                        return
                except OSError:
                    # The worker may be busy. The prefixes of a lost worker are dropped (`worker.py`).
                    continue
        finally:
            worker.prefixes = None
            await end_tasks(tasks)

    async def _has_ended(self, tasks: list[asyncio.Task[None]], worker: Worker) -> bool:
        """Wait between two checks. Return whether a subscription has ended."""
        done, _ = await asyncio.wait(tasks, timeout=_LOOK_EVERY * self._interval)
        for task in done:
            logger.warning("worker url=%s KV events cannot be followed: %r", worker.url, task.exception())
        return bool(done)
