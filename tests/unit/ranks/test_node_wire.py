"""Real connections between two nodes, both in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from splitserve.process.authentication import InitiatorHandshake
from splitserve.ranks import node_wire
from splitserve.ranks.node_wire import NODE_PROTOCOL, NodeConnection, NodeEnd, NodeEnding, NodeLostError, RankFailed

TOKEN = b"a token of this cluster"


@asynccontextmanager
async def streams() -> AsyncIterator[tuple]:
    """(reader, writer) of a node, and of node 0."""
    answered: asyncio.Future[tuple] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda r, w: answered.set_result((r, w)), "127.0.0.1", 0)
    here = await asyncio.open_connection(*server.sockets[0].getsockname())
    there = await answered
    try:
        yield here, there
    finally:
        for _, writer in (here, there):
            writer.close()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[NodeConnection, NodeConnection]]:
    async with streams() as (here, there):
        node, head = await asyncio.gather(NodeConnection.call(*here, TOKEN), NodeConnection.answer(*there, TOKEN))
        try:
            yield node, head
        finally:
            await node.close()
            await head.close()


async def test_both_sides_hear_each_other_in_order():
    async with connected() as (node, head):
        said = [RankFailed("no memory"), NodeEnding("a rank ended"), RankFailed("x" * 100_000)]
        for message in said:
            node.send(message)
        head.send(NodeEnd("over", in_order=True))
        assert [await head.receive() for _ in said] == said
        assert await node.receive() == NodeEnd("over", in_order=True)
        assert head.peer == "127.0.0.1"


async def test_another_token_is_refused_by_both():
    async with streams() as (here, there):
        answering = asyncio.create_task(NodeConnection.answer(*there, TOKEN))
        with pytest.raises(NodeLostError, match="cluster tokens differ"):
            await NodeConnection.call(*here, b"another token of a cluster")
        here[1].close()
        with pytest.raises(NodeLostError, match="during the handshake; perhaps the cluster tokens differ"):
            await answering


async def test_a_node_that_cannot_prove_the_token_is_rejected():
    async with streams() as (here, there):
        answering = asyncio.create_task(NodeConnection.answer(*there, TOKEN))
        here[1].write(InitiatorHandshake(NODE_PROTOCOL, b"").hello + bytes(32))
        with pytest.raises(NodeLostError, match="cluster tokens differ"):
            await answering


@pytest.mark.parametrize(
    ("greeting", "problem"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "does not use Splitserve's node protocol"),
        (b"SSNW" + (99).to_bytes(2, "little") + bytes(18), "node protocol version 2 against 99"),
    ],
    ids=["HTTP", "another version"],
)
async def test_who_speaks_otherwise_is_named(greeting, problem):
    async with streams() as (here, there):
        here[1].write(greeting)
        with pytest.raises(NodeLostError, match=problem):
            await NodeConnection.answer(*there, TOKEN)


async def test_the_end_of_the_connection_is_known_at_once():
    async with connected() as (node, head):
        listening = asyncio.create_task(head.receive())
        await node.close()
        with pytest.raises(NodeLostError, match="its connection ended"):
            await listening
        # No peer receives it, and it blocks no peer.
        node.send(RankFailed("late"))


async def test_signs_of_life_keep_a_connection_and_silence_ends_it(monkeypatch):
    monkeypatch.setattr(node_wire, "HEARTBEAT_INTERVAL", 0.01)
    async with connected() as (node, head):
        for _ in range(100):
            assert isinstance(await head._receive(), node_wire._Alive)
        node._alive.cancel()
        monkeypatch.setattr(node_wire, "SILENCE_TIMEOUT", 0.05)
        with pytest.raises(NodeLostError, match=r"silent for 0\.05 s"):
            await head.receive()


async def test_a_frame_that_was_made_changed_or_repeated_by_others_is_the_end():
    for meddle in (lambda frame: frame[:-1] + b"x", lambda frame: frame + frame):
        async with connected() as (node, head):
            written = []
            node._writer.write, write = written.append, node._writer.write
            node.send(NodeEnding("a rank ended"))
            write(meddle(written[0]))
            with pytest.raises(NodeLostError, match="no valid seal"):
                assert [await head.receive() for _ in range(2)] == []


async def test_what_comes_back_to_its_sender_is_not_taken():
    async with connected() as (node, head):
        written = []
        node._writer.write = written.append
        node.send(NodeEnding("a rank ended"))
        head._writer.write(written[0])
        with pytest.raises(NodeLostError, match="no valid seal"):
            await node.receive()


async def test_a_frame_too_large_is_not_read():
    async with connected() as (node, head):
        node._writer.write(node_wire._FRAME.pack(1 << 30, bytes(32)))
        with pytest.raises(NodeLostError, match="a message of 1073741824 bytes"):
            await head.receive()
