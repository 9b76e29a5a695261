"""Connection of a node above 0 to node 0 of its worker: retries until that answers, then waits until all are
connected."""

from __future__ import annotations

import asyncio
import logging

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.process.authentication import TOKENS_DIFFER
from splitserve.ranks.node_wire import NodeConnection, NodeEnd, NodeHello, NodeLostError, NodeStart
from splitserve.worker.node_place import parse_init_addr

logger = logging.getLogger(__name__)

# Seconds between two connection attempts, and timeout of each attempt.
_PAUSE = 0.5
_CONNECT_TIMEOUT = 5.0


async def call_head(config: WorkerConfig, hello: NodeHello, timeout: float) -> NodeConnection:
    """Connect to node 0.

    Raises WorkerUnavailableError if it does not answer in time, NodeLostError if it has another token.
    """
    where = config.parallel.dist_init_addr
    problem = told = ""
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    connection = await _try_once(config)
                    connection.send(hello)
                    return connection
                except NodeLostError as error:
                    if error.message == TOKENS_DIFFER:
                        raise
                    problem = error.message
                except (OSError, TimeoutError) as error:
                    problem = str(error) or "no answer"
                if problem != told:
                    logger.info("node 0 is not at %s yet, trying for %g s: %s", where, timeout, problem)
                    told = problem
                await asyncio.sleep(_PAUSE)
    except TimeoutError:
        raise WorkerUnavailableError(
            f"node 0 was not at {where} within {timeout:g} s ({problem}): start it with the same --dist-init-addr and "
            "--node-rank 0"
        ) from None


async def start_order(connection: NodeConnection) -> NodeStart | None:
    """Return the start order, sent when all nodes are connected. None: node 0 was ended before.

    Raises NodeLostError, and ConfigError if this node is rejected or another is missing. Node 0 enforces the deadline;
    if it is silent, it counts as lost.
    """
    message = await connection.receive()
    match message:
        case NodeStart():
            return message
        case NodeEnd(in_order=True):
            return None
        case NodeEnd(reason=reason):
            raise ConfigError(f"node 0 says: {reason}")
    raise NodeLostError(f"node 0 said {type(message).__name__} before anything else")


async def _try_once(config: WorkerConfig) -> NodeConnection:
    """Connect once. Raises OSError, TimeoutError, NodeLostError."""
    host, port = parse_init_addr(config.parallel.dist_init_addr)
    async with asyncio.timeout(_CONNECT_TIMEOUT):
        # Connect from the address at which the others reach this node, so that logs name it.
        own = (config.parallel.node_host, 0)
        reader, writer = await asyncio.open_connection(host, port, local_addr=own)
    try:
        return await NodeConnection.call(reader, writer, config.disaggregation.cluster_token.secret)
    except BaseException:
        writer.close()
        raise
