"""The rendezvous over real HTTP: server, registration and lookup."""

import threading

import httpx
import msgspec
import pytest

from splitserve.disaggregation.bootstrap import KVBootstrapServer
from splitserve.disaggregation.directory import HttpDirectory, register_rank
from splitserve.disaggregation.peers import LookupFailure
from splitserve.disaggregation.wire import KVArgs, ParallelRank, PrefillInfo
from splitserve.errors import ConfigError, WorkerUnavailableError
from splitserve.testing.kv_world import layout

DEADLINE = 20.0
RANK_0 = {"tp_rank": 0, "pp_rank": 0, "dp_rank": 0}


def info(epoch=1, version=1, **rank):
    args = KVArgs(
        backend="tcp",
        model="m",
        layout=layout(),
        metadata_row_bytes=64,
        num_metadata_rows=8,
        rank=ParallelRank(**rank),
    )
    return PrefillInfo(version=version, epoch=epoch, control_address="tcp://127.0.0.1:9", args=args)


@pytest.fixture
def server():
    server = KVBootstrapServer("127.0.0.1", 0)
    server.run()
    yield server
    server.close()


class Lookup:
    """A directory, and a wait for its answers."""

    def __init__(self, **rank):
        self.answered = threading.Event()
        self.directory = HttpDirectory(self.answered.set, **rank)

    def ask(self, port, timeout=DEADLINE):
        self.directory.request(("127.0.0.1", port), timeout)

    def answer(self, port):
        assert self.answered.wait(DEADLINE)
        return self.directory.result(("127.0.0.1", port))


@pytest.fixture
def lookup():
    made = []

    def make(**rank):
        made.append(Lookup(**rank))
        return made[-1]

    yield make
    for one in made:
        one.directory.close()


def get(server, params):
    return httpx.get(f"http://127.0.0.1:{server.port}/route", params=params, trust_env=False)


def test_what_prefill_registers_is_what_decode_finds(server, lookup):
    register_rank("127.0.0.1", server.port, info(epoch=77), timeout=DEADLINE)
    decode = lookup()
    decode.ask(server.port)
    assert decode.answer(server.port) == info(epoch=77)
    assert decode.directory.result(("127.0.0.1", server.port)) is None


def test_the_server_says_that_it_is_healthy_and_where(server):
    assert server.port > 0
    assert server.poll()
    assert httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False).status_code == 200
    server.close()
    server.close()
    assert not server.poll()


def test_a_lookup_waits_until_all_ranks_are_in(server, lookup):
    register_rank("127.0.0.1", server.port, info(tp_size=2, tp_rank=1), timeout=DEADLINE)
    assert get(server, RANK_0).status_code == 503
    decode = lookup(tp_rank=1)
    decode.ask(server.port)
    register_rank("127.0.0.1", server.port, info(tp_size=2, tp_rank=0), timeout=DEADLINE)
    assert decode.answer(server.port).args.rank.tp_rank == 1


def test_an_unknown_rank_is_404_and_a_malformed_question_400(server, lookup):
    register_rank("127.0.0.1", server.port, info(), timeout=DEADLINE)
    assert get(server, {**RANK_0, "dp_rank": 5}).status_code == 404
    assert get(server, {**RANK_0, "dp_rank": "x"}).status_code == 400
    assert get(server, {}).status_code == 400
    decode = lookup(dp_rank=5)
    decode.ask(server.port)
    failure = decode.answer(server.port)
    assert isinstance(failure, LookupFailure)
    assert failure.is_definitive
    assert "404" in failure.message


def test_a_new_epoch_and_a_new_shape_replace_what_was_there(server):
    register_rank("127.0.0.1", server.port, info(epoch=1), timeout=DEADLINE)
    register_rank("127.0.0.1", server.port, info(epoch=2), timeout=DEADLINE)
    assert msgspec.json.decode(get(server, RANK_0).content, type=PrefillInfo).epoch == 2
    register_rank("127.0.0.1", server.port, info(epoch=3, tp_size=2), timeout=DEADLINE)
    assert get(server, RANK_0).status_code == 503


@pytest.mark.parametrize(
    ("registration", "words"),
    [
        (info(version=8), "version 1 against 8"),
        (info(tp_rank=3, tp_size=2), "outside its sizes"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(server, registration, words):
    with pytest.raises(ConfigError, match=words):
        register_rank("127.0.0.1", server.port, registration, timeout=DEADLINE)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"version": 1}', b"\xff"])
def test_a_malformed_registration_is_400(server, body):
    response = httpx.put(f"http://127.0.0.1:{server.port}/route", content=body, trust_env=False)
    assert response.status_code == 400


def test_a_server_that_comes_late_is_found(server, lookup):
    port = server.port
    server.close()
    decode = lookup()
    decode.ask(port)
    late = KVBootstrapServer("127.0.0.1", port)
    late.run()
    try:
        register_rank("127.0.0.1", port, info(epoch=5), timeout=DEADLINE)
        assert decode.answer(port).epoch == 5
    finally:
        late.close()


def test_a_server_that_never_comes_ends_at_the_deadline(server, lookup):
    server.close()
    decode = lookup()
    decode.ask(server.port, timeout=0.1)
    failure = decode.answer(server.port)
    assert isinstance(failure, LookupFailure)
    assert not failure.is_definitive
    with pytest.raises(WorkerUnavailableError, match=str(server.port)):
        register_rank("127.0.0.1", server.port, info(), timeout=0.1)


def test_a_taken_port_is_an_error_at_the_start(server):
    second = KVBootstrapServer("127.0.0.1", server.port)
    with pytest.raises(OSError, match="in use"):
        second.run()
    assert not second.poll()
