"""Blocks of a request's prompt, computed with the model's own tokenizer as the workers do.

1. The tokenizer is that of `--model`, or of the first worker with a model folder that exists on this machine.
2. Prompts are tokenized and hashed in threads, so that a long prompt does not delay other requests.
3. A prompt that cannot be read has no blocks. Its request is routed by load to a pair, and a worker reports the error.

This module does not know which worker holds which block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from splitserve.api.prompt_tokens import prompts_of
from splitserve.api.tokenizer import Tokenizer
from splitserve.cache.kv_events import block_hash, page_names
from splitserve.cache.prefix import split_pages
from splitserve.core.errors import InvalidRequestError, ModelLoadError
from splitserve.engine.sources import resolve_model
from splitserve.router.prefixes import PromptBlocks

T = TypeVar("T")

logger = logging.getLogger(__name__)

# The tokenizer releases the interpreter's lock. More threads would take cores from the event loop and other processes.
_NUM_THREADS = 2
# Seconds a request waits for its blocks. After that it is routed without them.
READ_TIMEOUT = 5.0


class PromptReader:
    """Reader of prompts.

    `max_tokens` returns the longest context served; longer prompts are not tokenized. `close` it after use.
    """

    def __init__(self, max_tokens: Callable[[], int | None] = lambda: None) -> None:
        self._max_tokens = max_tokens
        self._tokenizer: Tokenizer | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompts")
        self._has_warned = False

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    async def load(self, model: str, *, is_local: bool = False) -> None:
        """Load the tokenizer of a model, and log if it has none. `model`: a folder or, unless `is_local`, a name."""

        def find() -> Path:
            if Path(model).is_dir():
                return Path(model)
            if is_local:
                raise ModelLoadError("the workers' folder is not on this machine: give the router --model")
            return resolve_model(model)

        try:
            self._tokenizer = await self._run(lambda: Tokenizer.load(find()))
            logger.info("tokenizer loaded model=%s", model)
        except (ModelLoadError, OSError, ValueError) as error:
            logger.warning("tokenizer of model %s cannot be loaded: %s", model, error)

    async def read(
        self, path: str, body: Mapping[str, Any], block_sizes: Collection[int], at_most: int | None = None
    ) -> Sequence[PromptBlocks]:
        """Return the first `at_most` prompts of the body. Empty: unknown. `at_most` None: all prompts."""
        max_tokens = self._max_tokens()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                found = await self._run(
                    lambda: hash_prompts(path, body, self._tokenizer, block_sizes, max_tokens, at_most)
                )
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
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


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
