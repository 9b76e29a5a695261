"""Node 0 of a worker on several hosts: it gathers the other nodes, starts them, and ends with them.

1. The address of `--dist-init-addr` is bound before anything else: nodes that are early wait in its backlog.
2. `gather` admits nodes that hold the cluster token and have the same settings, each once, until all have joined.
3. `begin` opens the sockets on which ranks of this host receive from those of others, and starts all nodes' ranks.
4. From then on `lost` is set as soon as any node, or one of its ranks, has ended.
5. `end` orders them to end, with the reason. `close` waits until they are gone.

This module starts no processes itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import msgspec

from splitserve import __version__
from splitserve.api.http_server import bind
from splitserve.core.clock import SystemClock
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, OptionError, SplitserveError, WorkerUnavailableError
from splitserve.core.parallel import ParallelRank, node_of
from splitserve.engine.fingerprint import model_fingerprint
from splitserve.process.lifecycle import Lifecycle
from splitserve.process.threads import end_tasks
from splitserve.ranks import node_wire
from splitserve.ranks.launch import parse_init_addr
from splitserve.ranks.rank_channel import Listeners, RankEndpoints
from splitserve.transfer.pending import PendingHandshakes

logger = logging.getLogger(__name__)

# Seconds for nodes to end their ranks and disconnect.
END_TIMEOUT = 10.0
# Size of the kernel's queue of connections that are not accepted yet.
_BACKLOG = 1024


class NodeHead:
    """Other nodes of a worker, seen from node 0. `sock`: bound to `--dist-init-addr`. Close after local processes."""

    def __init__(self, config: WorkerConfig, settings: dict[str, str], sock: socket.socket) -> None:
        """`settings`: must be the same on all nodes (`shared_settings`)."""
        self._config = config
        self._num_nodes = config.parallel.nnodes
        self._settings = settings
        self._socket = sock
        self._listeners = Listeners(config.parallel.node_host)
        # Node rank -> connection and hello of a node that has joined.
        self._nodes: dict[int, tuple[node_wire.NodeConnection, node_wire.NodeHello]] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        # Tasks of the connections that have not authenticated yet.
        self._pending: PendingHandshakes[asyncio.Task[None]] = PendingHandshakes("node join port", SystemClock())
        self._watches: list[asyncio.Task[None]] = []
        self._is_full = asyncio.Event()
        self._last_refusal = ""
        self._start: node_wire.NodeStart | None = None
        self._is_ending = False
        # Set once: what has ended on another node, and how.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Called with error and exit code of another node's rank, and when another node gets a shutdown signal.
        self.on_failed: Callable[[str, int], None] = lambda message, exit_code: None
        self.on_leaving: Callable[[], None] = lambda: None

    async def gather(self, timeout: float) -> None:
        """Wait for all nodes. Raises WorkerUnavailableError that names the missing ones."""
        server = await asyncio.start_server(self._greet, sock=self._socket, backlog=_BACKLOG)
        host, port = self._socket.getsockname()[:2]
        logger.info("waiting for %d other nodes of this worker at %s:%d", self._num_nodes - 1, host, port)
        try:
            async with asyncio.timeout(timeout):
                await self._is_full.wait()
        except TimeoutError:
            missing = " and ".join(str(n) for n in range(1, self._num_nodes) if n not in self._nodes)
            address = self._config.parallel.dist_init_addr
            problem = (
                f"node {missing} of {self._num_nodes} did not come to {address} within {timeout:g} s: "
                f"start it with the same options and its --node-rank{self._last_refusal}"
            )
            self.end(problem)
            raise WorkerUnavailableError(problem) from None
        finally:
            server.close()
            for greeting in self._greetings:
                greeting.cancel()

    def begin(self, instance: int, bootstrap_url: str | None) -> None:
        """Start the ranks of all nodes. Raises ConfigError."""
        try:
            init_methods = [self._listeners.open() for _ in range(self._config.dp_size)]
            names = [name for _, hello in self._nodes.values() for name in hello.pipes]
            from_rank = {name: self._listeners.open() for name in names}
        except OSError as error:
            host = self._config.parallel.node_host
            raise ConfigError(f"cannot listen on {host} for other nodes' ranks: {error.strerror}") from None
        self._start = node_wire.NodeStart(instance, bootstrap_url, init_methods, from_rank)
        for connection, _ in self._nodes.values():
            connection.send(self._start)

    def endpoints(self, one: ParallelRank, here: RankEndpoints) -> tuple[RankEndpoints, dict[str, int]]:
        """Return the endpoints of a driver's group, and the descriptors it listens on. Call after `begin`.

        `here`: endpoints for ranks of this host. Those of ranks on other hosts are replaced.
        """
        assert self._start is not None
        orders, to_rank, from_rank = list(here.orders), list(here.to_rank), list(here.from_rank)
        for rank in one.group():
            if node := node_of(rank, self._num_nodes):
                name = node_wire.pipe_name(one.dp_rank, rank.index)
                orders[rank.index], to_rank[rank.index] = self._nodes[node][1].pipes[name]
                from_rank[rank.index] = self._start.from_rank[name]
        endpoints = RankEndpoints(
            init_method=self._start.init_methods[one.dp_rank],
            orders=tuple(orders),
            to_rank=tuple(to_rank),
            from_rank=tuple(from_rank),
        )
        return endpoints, self._listeners.descriptors([endpoints.init_method, *from_rank])

    def started(self) -> None:
        """Close our copies of the listening sockets, after the processes of this host have inherited them."""
        self._listeners.close()

    def serves(self, url: str) -> None:
        for connection, _ in self._nodes.values():
            connection.send(node_wire.NodeServes(url))

    def end(self, reason: str, *, in_order: bool = False, exit_code: int = 1) -> None:
        """Order all nodes to end. Later calls do nothing."""
        if not self._is_ending:
            self._is_ending = True
            for connection, _ in self._nodes.values():
                connection.send(node_wire.NodeEnd(reason, in_order, exit_code))

    async def close(self) -> None:
        """End all nodes. Return when they are gone, or after END_TIMEOUT. Idempotent."""
        self.end("it could not go on, see its log")
        self._socket.close()
        self._listeners.close()
        if self._watches:
            await asyncio.wait(self._watches, timeout=END_TIMEOUT)
        await end_tasks((*self._watches, *self._greetings))
        for connection, _ in self._nodes.values():
            await connection.close()
        self._nodes = {}

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)
        peer = writer.get_extra_info("peername", ("?",))[0]
        if dropped := self._pending.add(task, peer):
            dropped.cancel()
        try:
            connection = await node_wire.NodeConnection.answer(
                reader, writer, self._config.disaggregation.cluster_token.secret
            )
        except node_wire.NodeLostError as error:
            why = f"a connection from {peer} is from no node of this worker: {error.message}"
            self._pending.reject(task, why)
            self._last_refusal = f"; the last one that was rejected: {why}"
            writer.close()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            self._pending.remove(task)
        is_in = False
        try:
            hello = await connection.receive()
            if not isinstance(hello, node_wire.NodeHello):
                raise node_wire.NodeLostError("it did not say hello")
            self._let_in(connection, hello)
            is_in = True
        except node_wire.NodeLostError as error:
            self._refuse(f"a node at {peer} was lost at once ({error.message})")
        except ConfigError as error:
            self._refuse(error.message)
            connection.send(node_wire.NodeEnd(error.message, exit_code=error.exit_code))
        finally:
            if not is_in:
                await connection.close()

    def _let_in(self, connection: node_wire.NodeConnection, hello: node_wire.NodeHello) -> None:
        """Admit a node. Raises ConfigError."""
        node_rank = hello.node_rank
        if problem := difference(node_rank, hello.settings, self._settings):
            raise ConfigError(problem)
        pipes = {node_wire.pipe_name(rank.dp_rank, rank.index) for rank in ranks_there(self._config, node_rank)}
        if not 0 < node_rank < self._num_nodes or set(hello.pipes) != pipes:
            raise OptionError("--node-rank", f"{node_rank} is none of the others of --nnodes {self._num_nodes}")
        if node_rank in self._nodes:
            there = self._nodes[node_rank][0].peer
            problem = f"there is a node {node_rank} already, at {there}: give each node its own --node-rank"
            # A retry can succeed: the other connection may be an earlier start of this node, which is about to end.
            raise ConfigError(problem, exit_code=1)
        self._nodes[node_rank] = connection, hello
        self._watches.append(asyncio.create_task(self._watch(node_rank, connection), name=f"node-{node_rank}"))
        logger.info("node %d of %d is there, from %s", node_rank, self._num_nodes, connection.peer)
        if len(self._nodes) == self._num_nodes - 1:
            self._is_full.set()

    def _refuse(self, why: str) -> None:
        logger.warning("%s", why)
        self._last_refusal = f"; the last one that was rejected: {why}"

    async def _watch(self, node_rank: int, connection: node_wire.NodeConnection) -> None:
        name = f"node {node_rank} ({connection.peer})"
        try:
            while True:
                match await connection.receive():
                    case node_wire.RankFailed(message=words, exit_code=exit_code):
                        self.on_failed(words, exit_code)
                    case node_wire.NodeEnding(what=what):
                        self._lose(f"{what} on {name}")
                    case node_wire.NodeLeaving():
                        logger.info("%s was told to end: draining", name)
                        self.on_leaving()
        except node_wire.NodeLostError as error:
            if self._is_full.is_set():
                self._lose(f"connection to {name} was lost ({error.message})")
            else:
                # The node may join again.
                logger.warning("%s was lost (%s)", name, error.message)
                del self._nodes[node_rank]
                await connection.close()

    def _lose(self, what: str) -> None:
        if not self.lost.done():
            self.lost.set_result(what)


def ranks_there(config: WorkerConfig, node_rank: int) -> list[ParallelRank]:
    """Return all ranks of this worker on that node."""
    parallel = config.parallel
    groups = (
        ParallelRank(dp_rank=i, dp_size=config.dp_size, tp_size=parallel.tp_size, pp_size=parallel.pp_size)
        for i in range(config.dp_size)
    )
    return [rank for one in groups for rank in one.group() if node_of(rank, parallel.nnodes) == node_rank]


# Settings of each node: its address and ports, its cores, its copy of the model (the weights themselves are compared).
_LOCAL = {
    "model.model",
    "model.threads",
    "model.cpu_affinity",
    "disaggregation.host",
    "disaggregation.bootstrap_port",
    "disaggregation.cluster_token",
    "disaggregation.transfer_options",
    "parallel.node_rank",
    "parallel.node_host",
    "parallel.dist_init_addr",
}
# Settings of node 0 alone, because the others answer no requests.
_OF_THE_FRONT_END = ("server", "kv_events")


def shared_settings(config: WorkerConfig, fingerprint: str) -> dict[str, str]:
    """Return the shared settings by name, as text. `fingerprint`: the model's."""
    found = {"version": __version__, "model": fingerprint}
    for part, values in msgspec.to_builtins(config).items():
        if part not in _OF_THE_FRONT_END:
            named = {f"{part}.{name}": v for name, v in values.items()} if isinstance(values, dict) else {part: values}
            found |= {
                name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
                for name, value in named.items()
                if name not in _LOCAL
            }
    return found


def difference(node_rank: int, theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """Return the differences between node 0, `ours`, and another node. None: there are none."""
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not differing:
        return None
    said = [
        f"{_words(name)} is {ours.get(name, 'unknown')} on node 0 and {theirs.get(name, 'unknown')} on node {node_rank}"
        for name in differing
    ]
    return f"{'; '.join(said)}: start all nodes with the same release, model and options"


def _words(name: str) -> str:
    """Return roughly the command-line option of a setting: `parallel.tp_size` is --tp-size."""
    part, dot, field = name.partition(".")
    return f"--{(field if dot else part).replace('_', '-')}" if name not in ("version", "model") else f"the {name}"


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

    async def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Only a drain is an orderly end of this worker.
        if lifecycle.draining.is_set():
            head.end("node 0 has ended", in_order=True)
        elif isinstance(error, SplitserveError):
            head.end(error.message, exit_code=error.exit_code)
        await head.close()

    closing.push_async_exit(end)
    head.on_leaving = lifecycle.draining.set
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
        await end_tasks((gathering, draining))


def bind_head(config: WorkerConfig) -> socket.socket:
    """Open the listener of node 0 for the other nodes. Raises ConfigError."""
    try:
        return bind(config.parallel.node_host, parse_init_addr(config.parallel.dist_init_addr)[1])
    except ConfigError as error:
        where = f"--dist-init-addr {config.parallel.dist_init_addr}"
        problem = f"{where}: {error.message.partition(': choose')[0]}; node 0 must have that address"
        # Keep the type: an address in use may be free at the next attempt.
        raise type(error)(problem) from None
