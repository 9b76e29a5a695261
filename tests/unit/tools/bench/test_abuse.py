"""The attacks' client, the figures' verdict, and how gaps are counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace

import pytest

from splitserve.core.errors import ConfigError
from splitserve.tools.bench import abuse
from splitserve.tools.bench.abuse import (
    NUM_STREAMS,
    AttackFigures,
    abuse_report,
    bench_abuse,
    gaps_in,
    have_gone_on,
    ttfts_in,
)
from splitserve.tools.bench.abuse_attacks import ATTACKS, AttackOrder, run_attack
from splitserve.tools.bench.load import Endpoint, StreamLoad
from splitserve.tools.bench.options import AbuseBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.client import open_session

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


def attack(name: str, handler: Handler, duration: float = 60.0) -> Counter[str]:
    """Run an attack on a server that has this handler on its HTTP port and on its internal port."""

    async def run() -> Counter[str]:
        connections: list[asyncio.Task[None]] = []

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(asyncio.ensure_future(handler(reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server, asyncio.timeout(300.0):
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            order = AttackOrder(name=name, urls=[url], model="m", internal_ports=[port], duration=duration)
            outcomes = await run_attack(order)
            await asyncio.gather(*connections, return_exceptions=True)
            return outcomes

    return asyncio.run(run())


async def reject_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as soon as the headers are there, and read the rest only to let the client see the answer."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.write_eof()
    while await reader.read(1 << 20):
        pass
    writer.close()


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def test_unread_streams_stay_open_though_the_server_sends() -> None:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read()
        writer.close()

    assert attack("unread-streams", send, duration=0.2) == {"open": 50}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("prompt-5mb", 1),
        ("chat-100000-messages", 1),
        ("grammar-bombs", 35),
        ("deep-json", 3),
        ("huge-content-length", 10),
    ],
)
def test_the_status_of_an_early_answer_is_seen(name: str, count: int) -> None:
    assert attack(name, reject_early) == {"HTTP 413": count}


def test_connections_that_the_server_closes_and_leaves_open_are_told_apart() -> None:
    assert attack("silent-connections", close_at_once) == {"closed": 200}
    assert attack("half-bodies", ignore, duration=0.2) == {"open": 50}
    # A second: on a busy machine that may be too short for the end of some.
    assert attack("silent-peers", close_at_once, duration=1.0).total() == 60


def test_every_attack_ends_and_counts_what_it_sent() -> None:
    # The bodies of the long prompts take their time, and differ by length alone.
    for name in (name for name in ATTACKS if not name.startswith("prompt-")):
        outcomes = attack(name, close_at_once, duration=0.2)
        assert bool(outcomes) == (name != "none"), name


def figures(**changed: object) -> AttackFigures:
    usual: dict[str, object] = {
        "name": "a",
        "longest_gap": 0.2,
        "longest_ttft": None,
        "growth": 1_000_000,
        "outcomes": {"HTTP 413": 3},
        "errors": (),
    }
    return AttackFigures(**(usual | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [{"longest_gap": 1.0}, {"growth": 300_000_001}, {"outcomes": {"HTTP 500": 1}}, {"errors": ["a stream failed: x"]}],
)
def test_each_kind_of_harm_fails_the_report(changed: dict[str, object]) -> None:
    options = AbuseBenchOptions(model="m")
    assert abuse_report(options, [figures()]).figures["passed"] is True
    harmful = abuse_report(options, [figures(), figures(**changed)])
    assert harmful.figures["passed"] is False
    assert harmful.failed
    assert harmful.to_json().keys() == {
        *("model", "dtype", "command", "num_streams", "machine", "attacks", "limits", "passed")
    }
    assert harmful.tables[0].rows[0][-1] == "ok"
    assert harmful.tables[0].rows[1][-1] != "ok"


def test_gaps_that_touch_the_attack_count_and_others_do_not() -> None:
    stream = StreamRecord(9.0, [10.0, 11.0, 14.0, 14.5, 20.0])
    assert gaps_in([stream], 12.0, 13.0) == [3.0]
    assert gaps_in([stream], 14.2, 14.3) == [0.5]
    assert ttfts_in([stream], 9.5, 9.6) == [1.0]
    assert not ttfts_in([stream], 12.0, 13.0)
    assert have_gone_on([stream] * NUM_STREAMS, 19.0)
    assert not have_gone_on([stream] * NUM_STREAMS, 20.0)
    assert not have_gone_on([stream] * (NUM_STREAMS - 1), 19.0)


async def test_an_error_between_two_attacks_counts_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def done(*args: object, **how: object) -> SimpleNamespace:
        return SimpleNamespace(errors=())

    monkeypatch.setattr(abuse, "_attack_in_process", lambda order: ({}, []))
    monkeypatch.setattr(abuse, "_go_on", done)
    monkeypatch.setattr(abuse, "run_load", done)
    order = AttackOrder(name="none", urls=[], model="m", internal_ports=[], duration=1.0)
    async with open_session(1.0) as session:
        load = StreamLoad(Endpoint("http://127.0.0.1:1", "m"), session)
        found = []
        for error in ("HTTP 500", ""):
            load.errors.update([error] if error else [])
            found.append((await abuse._attack(order, (), load.endpoint, load)).errors)
    assert found == [["a stream failed: HTTP 500"], []]


def test_an_unknown_attack_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigError, match="--attack nope: no such attack; choose from none, prompt-1mb"):
        run_bench(AbuseBenchOptions(attack=["nope"]), bench_abuse)
