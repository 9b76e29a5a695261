"""Process of `splitserve serve --node-rank N`, N above 0: it owns the ranks of a worker on this host.

1. It opens the listeners of its ranks, connects to node 0 with retries, and sends its settings (`node_wire.py`).
2. Node 0 reports when all nodes are connected. Then the ranks start, as node 0's own ranks do.
3. It watches its ranks and node 0. A rank that ends on one host ends the worker, and so its ranks on all hosts.
4. A first signal requests a drain from node 0; this node stays until that is done. A second signal, its parent's end,
   or the loss of node 0 ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, SplitserveError, WorkerUnavailableError
from splitserve.core.messages import SchedulerFailed, decode_from_scheduler
from splitserve.core.parallel import ParallelRank
from splitserve.engine.fingerprint import model_fingerprint
from splitserve.engine.sources import resolve_model
from splitserve.process.authentication import TOKENS_DIFFER
from splitserve.process.cluster_token import settle_host
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, write_ready_file
from splitserve.process.owned_folder import OwnedFolder
from splitserve.process.settings import setup_logger
from splitserve.process.threads import end_tasks
from splitserve.ranks import node_wire
from splitserve.ranks.launch import LaunchConfig, parse_init_addr
from splitserve.ranks.node_head import ranks_there, shared_settings
from splitserve.ranks.processes import FOLLOWER_COMMAND, SchedulerProcess, end_started, first_end
from splitserve.ranks.rank_channel import Listeners, RankEndpoints
from splitserve.ranks.scheduler_start import SchedulerStart

logger = logging.getLogger(__name__)

# Seconds beyond the drain timeout in which node 0 ends its own processes.
_END_MARGIN = 30.0
# Seconds in which node 0 may report the reason of the end, after this node reported that a rank has ended.
_LAST_WORDS = 5.0


def run_node(config: WorkerConfig, options: LaunchConfig) -> int:
    """Run the ranks until node 0 ends, or a signal. Return the exit code: 0 for an orderly end.

    Raises ConfigError, ModelLoadError before anything has started.
    """
    config = msgspec.structs.replace(config, disaggregation=settle_host(config.disaggregation))
    setup_logger(config.server.log_level, config.server.log_format)
    folder = resolve_model(config.model.model)
    return uvloop.run(_Node(config, options, folder).run())


class _Node:
    def __init__(self, config: WorkerConfig, options: LaunchConfig, folder: Path) -> None:
        self._config = config
        self._options = options
        self._folder = folder
        self._rank = config.parallel.node_rank
        self._lifecycle = Lifecycle()
        self._ranks = ranks_there(config, self._rank)
        self._listeners = Listeners(config.parallel.node_host)
        self._connection: node_wire.NodeConnection | None = None
        self._processes: list[SchedulerProcess] = []
        self._has_served = False

    async def run(self) -> int:
        async with AsyncExitStack() as closing:
            closing.enter_context(self._lifecycle.watch(exit_with_parent=self._options.exit_with_parent))
            closing.callback(self._listeners.close)
            work = asyncio.create_task(self._work(closing), name="node")
            ends = [asyncio.create_task(self._lifecycle.stopping.wait()), asyncio.create_task(self._leave())]
            await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks(ends)
            if not work.done():
                logger.warning("node %d received the order to end: its worker ends with it", self._rank)
                if self._connection is not None:
                    self._connection.send(node_wire.NodeEnding("launcher was told to end at once"))
                self._kill()
                await end_tasks((work,))
                return self._lifecycle.exit_code(has_served=self._has_served)
            try:
                return work.result() or self._lifecycle.exit_code(has_served=self._has_served)
            except SplitserveError as error:
                self._kill()
                logger.error("node %d of this worker ends: %s", self._rank, error.message)
                return error.exit_code

    async def _work(self, closing: AsyncExitStack) -> int:
        """Run the ranks. Return the exit code.

        Raises SplitserveError if this node could not start, or if node 0 is lost.
        """
        try:
            # The endpoints at which each rank receives orders, and messages about rooms.
            pipes = {
                node_wire.pipe_name(rank.dp_rank, rank.index): (self._listeners.open(), self._listeners.open())
                for rank in self._ranks
            }
        except OSError as error:
            problem = f"cannot listen on {self._config.parallel.node_host} ({error.strerror})"
            raise ConfigError(f"{problem}: name an address of this host by --host") from None
        fingerprint = await asyncio.to_thread(model_fingerprint, self._folder)
        hello = node_wire.NodeHello(self._rank, shared_settings(self._config, fingerprint), pipes)
        self._connection = connection = await call_head(self._config, hello, self._config.model.load_timeout)
        closing.push_async_callback(connection.close)
        told = await start_order(connection)
        if told is None:
            logger.info("node %d ends: node 0 was told to end before all were there", self._rank)
            return 0
        folder = closing.enter_context(OwnedFolder.for_sockets())
        self._open_last_words(connection, f"ipc://{folder}/last-words", closing)
        await self._start_ranks(told, pipes, str(folder), closing)
        ended = asyncio.create_task(first_end(self._processes, all_together=True), name="node-watch")
        hearing = asyncio.create_task(self._hear(connection), name="node-hear")
        closing.push_async_callback(end_tasks, (ended, hearing))
        await asyncio.wait({hearing, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            connection.send(node_wire.NodeEnding(ended.result()))
            await asyncio.wait({hearing}, timeout=_LAST_WORDS)
        if not hearing.done():
            raise node_wire.NodeLostError(f"the {ended.result()}, and node 0 sends nothing")
        end = hearing.result()
        if not end.in_order:
            raise end.error()
        logger.info("node %d ends: %s", self._rank, end.reason)
        return 0

    async def _leave(self) -> None:
        """Return when this node need not wait for node 0 any longer."""
        await self._lifecycle.draining.wait()
        if self._connection is not None:
            self._connection.send(node_wire.NodeLeaving())
            await asyncio.sleep(self._options.drain_timeout + _END_MARGIN)

    def _open_last_words(self, connection: node_wire.NodeConnection, endpoint: str, closing: AsyncExitStack) -> None:
        """Bind the endpoint to which a rank sends why it ends.

        The reason is forwarded to node 0, which ends all requests with it.
        """
        context = zmq.asyncio.Context()
        closing.callback(context.term)
        pull = context.socket(zmq.PULL)
        closing.callback(pull.close, 0)
        pull.bind(endpoint)

        async def forward() -> None:
            while True:
                message = decode_from_scheduler(await pull.recv())
                if isinstance(message, SchedulerFailed):
                    connection.send(node_wire.RankFailed(message.message, message.exit_code))

        closing.push_async_callback(end_tasks, [asyncio.create_task(forward(), name="node-last-words")])

    async def _start_ranks(
        self, told: node_wire.NodeStart, pipes: dict[str, tuple[str, str]], folder: str, closing: AsyncExitStack
    ) -> None:
        # A cancelled start would leave a process without an owner: `closing` waits for it, and ends it.
        starting: list[asyncio.Task[SchedulerProcess]] = []
        closing.push_async_callback(end_started, starting)
        for rank in self._ranks:
            name = node_wire.pipe_name(rank.dp_rank, rank.index)
            orders, to_rank = pipes[name]
            start = SchedulerStart(
                config=self._config,
                model_folder=str(self._folder),
                to_scheduler="",
                from_scheduler=f"ipc://{folder}/last-words",
                bootstrap_url=told.bootstrap_url,
                rank=rank,
                instance=told.instance,
                endpoints=RankEndpoints(
                    init_method=told.init_methods[rank.dp_rank],
                    orders=_only(rank, orders),
                    to_rank=_only(rank, to_rank),
                    from_rank=_only(rank, told.from_rank[name]),
                ),
                descriptors=self._listeners.descriptors(pipes[name]),
                heartbeat=f"{folder}/heartbeat-{name}",
            )
            starting.append(asyncio.create_task(SchedulerProcess.start(FOLLOWER_COMMAND, start)))
        self._processes = list(await asyncio.shield(asyncio.gather(*starting)))
        self._listeners.close()

    async def _hear(self, connection: node_wire.NodeConnection) -> node_wire.NodeEnd:
        """Receive messages up to node 0's last one, and return that. Raises NodeLostError."""
        try:
            while True:
                match await connection.receive():
                    case node_wire.NodeServes(url=url):
                        self._serves(url)
                    case node_wire.NodeEnd() as end:
                        return end
        except node_wire.NodeLostError as error:
            where = self._config.parallel.dist_init_addr
            raise node_wire.NodeLostError(f"node 0 at {where} was lost ({error.message})") from error

    def _serves(self, url: str) -> None:
        self._has_served = True
        num_nodes, num_ranks = self._config.parallel.nnodes, len(self._processes)
        logger.info("node %d of %d serves %d ranks of %s", self._rank, num_nodes, num_ranks, url)
        if self._options.ready_file is not None:
            info = ReadyInfo(
                pid=os.getpid(),
                port=0,
                url=url,
                follower_pids=tuple(process.pid for process in self._processes),
                disaggregation_mode=str(self._config.disaggregation.mode),
            )
            write_ready_file(self._options.ready_file, info)

    def _kill(self) -> None:
        """Kill the ranks: they may wait inside a collective for ranks that are lost."""
        for process in self._processes:
            process.kill()


def _only(rank: ParallelRank, endpoint: str) -> tuple[str, ...]:
    """Return the endpoints by `ParallelRank.index`; a follower has only its own."""
    return tuple(endpoint if i == rank.index else "" for i in range(rank.group_size))


# Seconds between two connection attempts, and timeout of each attempt.
_PAUSE = 0.5
_CONNECT_TIMEOUT = 5.0


async def call_head(config: WorkerConfig, hello: node_wire.NodeHello, timeout: float) -> node_wire.NodeConnection:
    """Connect to node 0.

    Raises WorkerUnavailableError if it does not answer in time, ConfigError if it has another token.
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
                except node_wire.NodeLostError as error:
                    if error.message == TOKENS_DIFFER:
                        raise ConfigError(error.message) from None
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


async def start_order(connection: node_wire.NodeConnection) -> node_wire.NodeStart | None:
    """Return the start order, sent when all nodes are connected. None: node 0 was ended before.

    Raises NodeLostError, also if this node is rejected or another is missing. Node 0 enforces the deadline; if it is
    silent, it counts as lost.
    """
    message = await connection.receive()
    match message:
        case node_wire.NodeStart():
            return message
        case node_wire.NodeEnd(in_order=True):
            return None
        case node_wire.NodeEnd() as end:
            raise end.error()
    raise node_wire.NodeLostError(f"node 0 said {type(message).__name__} before anything else")


async def _try_once(config: WorkerConfig) -> node_wire.NodeConnection:
    """Connect once. Raises OSError, TimeoutError, NodeLostError."""
    host, port = parse_init_addr(config.parallel.dist_init_addr)
    async with asyncio.timeout(_CONNECT_TIMEOUT):
        # Connect from the address at which the others reach this node, so that logs name it.
        own = (config.parallel.node_host, 0)
        reader, writer = await asyncio.open_connection(host, port, local_addr=own)
    try:
        return await node_wire.NodeConnection.call(reader, writer, config.disaggregation.cluster_token.secret)
    except BaseException:
        writer.close()
        raise
