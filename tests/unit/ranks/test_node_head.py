"""Node 0 and the nodes that join it, all in this process: admitted, missing and lost nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from splitserve import __version__
from splitserve.api.http_server import bind, port_of
from splitserve.core.config import (
    CacheConfig,
    ClusterToken,
    DisaggregationConfig,
    ModelConfig,
    ServerConfig,
    WorkerConfig,
)
from splitserve.core.errors import AddressTakenError, ConfigError, UnsupportedModelError, WorkerUnavailableError
from splitserve.core.parallel import ParallelConfig, ParallelRank
from splitserve.process.lifecycle import Lifecycle
from splitserve.ranks.node_head import NodeHead, bind_head, difference, gather_nodes, ranks_there, shared_settings
from splitserve.ranks.node_process import call_head, start_order
from splitserve.ranks.node_wire import (
    NodeConnection,
    NodeEnd,
    NodeEnding,
    NodeHello,
    NodeLeaving,
    NodeLostError,
    NodeServes,
    RankFailed,
    pipe_name,
)
from splitserve.ranks.rank_channel import RankEndpoints
from splitserve.transfer.pending import MAX_PENDING_PER_ADDRESS
from support.loop_clock import advance

TOKEN = ClusterToken(b"a token of this cluster")
DEADLINE = 60.0


def config_of(node_rank: int = 0, *, port: int = 1, nnodes: int = 3, token: ClusterToken = TOKEN, **more: Any):
    parallel = ParallelConfig(
        tp_size=2,
        pp_size=3,
        nnodes=nnodes,
        node_rank=node_rank,
        dist_init_addr=f"127.0.0.1:{port}",
        node_host="127.0.0.1",
    )
    return WorkerConfig(parallel=parallel, disaggregation=DisaggregationConfig(cluster_token=token), **more)


async def instance_of(node: NodeConnection) -> int:
    told = await start_order(node)
    assert told is not None
    return told.instance


class World:
    def __init__(self) -> None:
        sock = bind("127.0.0.1", 0)
        self.port = port_of(sock)
        config = config_of(port=self.port)
        self.head = NodeHead(config, shared_settings(config, "fingerprint"), sock)
        self.nodes: list[NodeConnection] = []

    async def gathered(self, lifecycle: Lifecycle, closing: AsyncExitStack) -> list[NodeConnection]:
        """Both nodes, as a worker that lives so long has them."""
        sock = bind("127.0.0.1", 0)
        self.port = port_of(sock)
        config = config_of(port=self.port)
        gathering = asyncio.create_task(gather_nodes(config, sock, Path(), lifecycle, DEADLINE, closing))
        nodes = [await self.come(1), await self.come(2)]
        head = await gathering
        assert head is not None
        return nodes

    async def come(self, node_rank: int, fingerprint: str = "fingerprint", **more: Any) -> NodeConnection:
        config = config_of(node_rank, port=self.port, **more)
        ranks = ranks_there(config, node_rank)
        pipes = {pipe_name(0, r.index): (f"orders-{r.index}", f"to-{r.index}") for r in ranks}
        hello = NodeHello(node_rank, shared_settings(config, fingerprint), pipes)
        connection = await call_head(config, hello, DEADLINE)
        self.nodes.append(connection)
        return connection

    async def begun(self) -> list[NodeConnection]:
        """Return both nodes after their start order."""
        gathering = asyncio.create_task(self.head.gather(DEADLINE))
        nodes = [await self.come(1), await self.come(2)]
        await gathering
        self.head.begin(7, "http://127.0.0.1:8998")
        for node in nodes:
            assert await instance_of(node) == 7
        return nodes


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    yield found
    # They first: the head waits for them.
    for node in found.nodes:
        await node.close()
    await found.head.close()


async def test_all_come_and_each_learns_where_the_driver_hears_it(world):
    gathering = asyncio.create_task(world.head.gather(DEADLINE))
    two, one = await world.come(2), await world.come(1)
    await gathering
    world.head.begin(7, None)
    told = await start_order(one)
    assert told is not None
    assert told == await start_order(two)
    # The driver is on node 0 with another rank of its stage: four are elsewhere.
    assert set(told.from_rank) == {"0.0", "0.1", "0.2", "0.3"}
    here = RankEndpoints.in_folder("/pipes", "0", 6)
    endpoints, descriptors = world.head.endpoints(ParallelRank(tp_size=2, pp_size=3), here)
    assert endpoints.orders == ("orders-0", "orders-1", "orders-2", "orders-3", *here.orders[4:])
    assert endpoints.to_rank[:4] == ("to-0", "to-1", "to-2", "to-3")
    assert endpoints.from_rank == (*(told.from_rank[f"0.{i}"] for i in range(4)), *here.from_rank[4:])
    assert endpoints.init_method == told.init_methods[0]
    assert set(descriptors) == {endpoints.init_method, *endpoints.from_rank[:4]}
    world.head.started()
    world.head.serves("http://10.0.0.1:30000")
    assert await one.receive() == NodeServes("http://10.0.0.1:30000")
    world.head.end("enough", in_order=True)
    world.head.end("later words are not said")
    assert [await two.receive() for _ in range(2)][1] == NodeEnd("enough", in_order=True)


async def test_connections_that_do_not_authenticate_keep_no_node_out(world, caplog):
    gathering = asyncio.create_task(world.head.gather(DEADLINE))
    silent = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2 * MAX_PENDING_PER_ADDRESS)]
    try:
        async with asyncio.timeout(DEADLINE):
            await world.come(1)
            # A silent one has a second at most.
            assert await silent[-1][0].read() == b""
            await world.come(2)
            await gathering
    finally:
        for _, writer in silent:
            writer.close()
    assert len([r for r in caplog.records if "unauthenticated" in r.getMessage()]) == 1


async def test_who_does_not_come_is_named_to_all(world):
    gathering = asyncio.create_task(world.head.gather(DEADLINE))
    one = await world.come(1)
    while 1 not in world.head._nodes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    advance(DEADLINE)
    with pytest.raises(WorkerUnavailableError, match=r"node 2 of 3 did not come to 127\.0\.0\.1:\d+ within 60 s"):
        await gathering
    with pytest.raises(NodeLostError, match="node 0 reports: node 2 of 3 did not come") as lost:
        await start_order(one)
    assert lost.value.exit_code == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"fingerprint": "other"}, "the model is fingerprint on node 0 and other on node 1"),
        ({"nnodes": 2}, "--nnodes is 3 on node 0 and 2 on node 1"),
        ({"cache": CacheConfig(page_size=8)}, "--page-size is 16 on node 0 and 8 on node 1"),
    ],
    ids=str,
)
async def test_who_was_told_otherwise_is_refused_with_both_values_and_may_come_again(world, more, problem):
    gathering = asyncio.create_task(world.head.gather(DEADLINE))
    # Of three pipeline stages two nodes could not have whole ones: it has other ranks, too.
    other = await world.come(1, **more)
    with pytest.raises(NodeLostError, match=problem) as refused:
        await start_order(other)
    assert refused.value.exit_code == 2
    await world.come(1)
    await world.come(2)
    await gathering


async def test_a_number_is_one_nodes_alone_until_that_is_gone(world):
    gathering = asyncio.create_task(world.head.gather(DEADLINE))
    first = await world.come(1)
    with pytest.raises(NodeLostError, match=r"there is a node 1 already, at 127\.0\.0\.1") as refused:
        await start_order(await world.come(1))
    assert refused.value.exit_code == 1
    await first.close()
    while 1 in world.head._nodes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    again = await world.come(1)
    await world.come(2)
    await gathering
    world.head.begin(7, None)
    assert await instance_of(again) == 7


async def test_who_has_another_token_does_not_get_in_and_ends_nobody(world):
    gathering = asyncio.create_task(world.head.gather(DEADLINE))
    with pytest.raises(ConfigError, match="cluster tokens differ"):
        await world.come(1, token=ClusterToken(b"another token of a cluster"))
    await world.come(1)
    await world.come(2)
    await gathering


async def test_whatever_ends_elsewhere_is_told(world):
    failed, leaving = [], asyncio.Event()
    world.head.on_failed, world.head.on_leaving = lambda *words: failed.append(words), leaving.set
    one, two = await world.begun()
    two.send(NodeLeaving())
    await leaving.wait()
    one.send(RankFailed("rank tp 0 of 2: no memory", 2))
    one.send(NodeEnding("scheduler process ended with code 1"))
    assert await world.head.lost == "scheduler process ended with code 1 on node 1 (127.0.0.1)"
    assert failed == [("rank tp 0 of 2: no memory", 2)]
    await two.close()


async def test_a_node_that_is_gone_is_lost_at_once(world):
    one, _ = await world.begun()
    await one.close()
    assert await world.head.lost == "connection to node 1 (127.0.0.1) was lost (its connection ended)"


@pytest.fixture
def fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.ranks.node_head.model_fingerprint", lambda folder: "fingerprint")


async def test_the_first_signal_drains_also_where_another_host_had_its_own_before(world, fingerprint):
    lifecycle = Lifecycle()
    async with AsyncExitStack() as closing:
        nodes = await world.gathered(lifecycle, closing)
        nodes[0].send(NodeLeaving())
        await lifecycle.draining.wait()
        lifecycle.request_end()
        assert not lifecycle.stopping.is_set()
        lifecycle.request_end()
        assert lifecycle.stopping.is_set()
        for node in nodes:
            await node.close()


@pytest.mark.parametrize("was_told", [True, False])
async def test_node_0_ends_in_order_only_where_it_was_told_to(world, fingerprint, was_told):
    lifecycle = Lifecycle()
    closing = AsyncExitStack()
    nodes = await world.gathered(lifecycle, closing)
    if was_told:
        lifecycle.request_end()
    ending = asyncio.create_task(closing.aclose())
    end = await nodes[0].receive()
    assert isinstance(end, NodeEnd)
    assert end.in_order == was_told
    if was_told:
        assert await start_order(nodes[1]) is None
    else:
        with pytest.raises(NodeLostError, match="node 0 reports: it could not go on, see its log"):
            await start_order(nodes[1])
    for node in nodes:
        await node.close()
    await ending


async def test_other_nodes_get_the_error_of_node_0_with_its_exit_code(world, fingerprint):
    nodes = []

    async def fail() -> None:
        async with AsyncExitStack() as closing:
            nodes.extend(await world.gathered(Lifecycle(), closing))
            raise UnsupportedModelError("the model is not supported")

    failing = asyncio.create_task(fail())
    while len(nodes) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(NodeLostError, match="node 0 reports: the model is not supported") as lost:
        await start_order(nodes[1])
    assert lost.value.exit_code == 2
    for node in nodes:
        await node.close()
    with pytest.raises(UnsupportedModelError):
        await failing


def test_an_address_that_is_taken_may_be_free_when_it_is_tried_again():
    with bind("127.0.0.1", 0) as taken, pytest.raises(AddressTakenError, match="node 0 must have that address"):
        bind_head(config_of(port=port_of(taken)))


async def test_who_comes_before_node_0_waits_for_it():
    # Bound, so that no other process listens there.
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = port_of(sock)
        with pytest.raises(WorkerUnavailableError, match=rf"node 0 was not at 127\.0\.0\.1:{port} within 0\.1 s"):
            await call_head(config_of(1, port=port), NodeHello(1, {}, {}), 0.1)


def test_what_is_a_nodes_own_may_differ_and_nothing_secret_is_said():
    ours = config_of(0, model=ModelConfig(model="/here/llama", threads=4))
    theirs = config_of(
        1, model=ModelConfig(model="/there/llama", threads=2), server=ServerConfig(port=1, log_level="debug")
    )
    said = shared_settings(ours, "f"), shared_settings(theirs, "f")
    assert difference(1, said[1], said[0]) is None
    assert said[0]["version"] == __version__
    assert "disaggregation.cluster_token" not in said[0]
    wrong = msgspec.structs.replace(theirs, dp_size=2)
    assert difference(1, shared_settings(wrong, "f"), said[0]) == (
        "--dp-size is 1 on node 0 and 2 on node 1: start all nodes with the same release, model and options"
    )
    assert "the version is 1 on node 0 and 2 on node 1" in str(difference(1, {"version": "2"}, {"version": "1"}))


def test_no_rank_is_on_two_nodes():
    config = msgspec.structs.replace(config_of(), dp_size=2)
    ranks = [ranks_there(config, node) for node in range(3)]
    assert [len(there) for there in ranks] == [4, 4, 4]
    assert len({rank for there in ranks for rank in there}) == 12
