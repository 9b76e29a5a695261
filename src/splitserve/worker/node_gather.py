"""Wait of node 0 for the other nodes of a worker on several hosts, or for a signal that ends it before."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import SplitserveError
from splitserve.engine.fingerprint import model_fingerprint
from splitserve.process.lifecycle import Lifecycle
from splitserve.ranks.node_head import NodeHead
from splitserve.ranks.node_settings import shared_settings

logger = logging.getLogger(__name__)


async def gather_nodes(
    config: WorkerConfig,
    sock: socket.socket,
    folder: Path,
    lifecycle: Lifecycle,
    timeout: float,
    closing: AsyncExitStack,
) -> NodeHead | None:
    """Wait for all nodes and return them; `closing` ends them.

    None: some nodes did not connect, or a signal ended the worker.

    `sock`: listener for the nodes. `folder`: of the model.
    """
    fingerprint = await asyncio.to_thread(model_fingerprint, folder)
    head = NodeHead(config, shared_settings(config, fingerprint), sock)

    async def end() -> None:
        # Only a drain is an orderly end of this worker.
        if lifecycle.draining.is_set():
            head.end("node 0 has ended", in_order=True)
        await head.close()

    closing.push_async_callback(end)
    head.on_leaving = lifecycle.drain
    gathering = asyncio.create_task(head.gather(timeout), name="gather-nodes")
    draining = asyncio.create_task(lifecycle.draining.wait())
    try:
        await asyncio.wait({gathering, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return None
        await gathering
        return head
    except SplitserveError as error:
        logger.error("this worker could not start: %s", error)
        return None
    finally:
        gathering.cancel()
        draining.cancel()
        await asyncio.gather(gathering, draining, return_exceptions=True)
