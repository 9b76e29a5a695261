"""The rendezvous over real HTTP: server, registration and lookup."""

import contextlib
import socket
import threading

import httpx
import msgspec
import pytest

from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.core.parallel import ParallelRank
from splitserve.process.authentication import answer_challenge
from splitserve.transfer import pending
from splitserve.transfer.bootstrap import KVBootstrapServer
from splitserve.transfer.directory import ClusterAuth, HttpDirectory, register_rank
from splitserve.transfer.peers import BootstrapAddress, LookupFailure
from splitserve.transfer.wire import PROTOCOL_VERSION, KVArgs, PrefillInfo
from support.kv_world import layout

DEADLINE = 60.0
TOKEN = b"a token of the cluster"
RANK_0 = {"version": PROTOCOL_VERSION, "dp_rank": 0}


def info(epoch=1, version=PROTOCOL_VERSION, instance=0, **rank):
    args = KVArgs(
        backend="tcp",
        model="m",
        layout=layout(),
        metadata_row_bytes=64,
        num_metadata_rows=8,
        rank=ParallelRank(**rank),
    )
    return PrefillInfo(version=version, epoch=epoch, instance=instance, control_address="tcp://127.0.0.1:9", args=args)


@pytest.fixture
def server():
    server = KVBootstrapServer("127.0.0.1", 0, TOKEN)
    server.run()
    yield server
    server.close()


class Lookup:
    """A directory, and a wait for its answers."""

    def __init__(self, token=TOKEN):
        self.answered = threading.Event()
        self.directory = HttpDirectory(self.answered.set, token)

    def ask(self, port, timeout=DEADLINE, dp_rank=0):
        self.directory.request(BootstrapAddress("127.0.0.1", port, dp_rank), timeout)

    def answer(self, port, dp_rank=0):
        assert self.answered.wait(DEADLINE)
        return self.directory.result(BootstrapAddress("127.0.0.1", port, dp_rank))


@pytest.fixture
def lookup():
    made = []

    def make(**options):
        made.append(Lookup(**options))
        return made[-1]

    yield make
    for one in made:
        one.directory.close()


def get(server, params, token=TOKEN):
    url = f"http://127.0.0.1:{server.port}/route"
    return httpx.get(url, params=params, auth=ClusterAuth(token), trust_env=False, timeout=DEADLINE)


def epoch_of(server):
    """Of the first rank found."""
    return msgspec.json.decode(get(server, RANK_0).content, type=list[PrefillInfo])[0].epoch


def put(server, body, token=TOKEN):
    url = f"http://127.0.0.1:{server.port}/route"
    return httpx.put(url, content=body, auth=ClusterAuth(token), trust_env=False, timeout=DEADLINE)


def register(server, registration, token=TOKEN):
    register_rank("127.0.0.1", server.port, registration, token, timeout=DEADLINE)


def test_what_prefill_registers_is_what_decode_finds(server, lookup):
    register(server, info(epoch=77))
    decode = lookup()
    decode.ask(server.port)
    assert decode.answer(server.port) == [info(epoch=77)]
    assert decode.directory.result(("127.0.0.1", server.port)) is None


def test_the_server_says_that_it_is_healthy_and_where(server):
    assert server.port > 0
    url = f"http://127.0.0.1:{server.port}/health"
    assert httpx.get(url, trust_env=False).status_code == 200
    server.close()
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_a_lookup_waits_until_all_ranks_are_in(server, lookup):
    ranks = [info(epoch=n, tp_size=2, pp_size=2, tp_rank=n % 2, pp_rank=n // 2) for n in range(4)]
    for rank in ranks[:0:-1]:
        register(server, rank)
    assert get(server, RANK_0).status_code == 503
    decode = lookup()
    decode.ask(server.port)
    register(server, ranks[0])
    assert decode.answer(server.port) == ranks


def test_an_unknown_rank_is_404_and_a_malformed_question_400(server, lookup):
    register(server, info())
    assert get(server, {**RANK_0, "dp_rank": 5}).status_code == 404
    assert get(server, {**RANK_0, "dp_rank": "x"}).status_code == 400
    assert get(server, {}).status_code == 400
    decode = lookup()
    decode.ask(server.port, dp_rank=5)
    failure = decode.answer(server.port, dp_rank=5)
    assert isinstance(failure, LookupFailure)
    assert failure.is_definitive
    assert "404" in failure.message


def test_a_new_epoch_and_a_new_shape_replace_what_was_there(server):
    register(server, info(epoch=1))
    register(server, info(epoch=2))
    assert epoch_of(server) == 2
    register(server, info(epoch=3, tp_size=2))
    assert get(server, RANK_0).status_code == 503


def test_ranks_of_two_starts_of_a_worker_are_not_mixed(server):
    for n in range(2):
        register(server, info(epoch=n, instance=1, tp_size=2, tp_rank=n))
    register(server, info(epoch=2, instance=2, tp_size=2, tp_rank=1))
    assert get(server, RANK_0).status_code == 503
    register(server, info(epoch=3, instance=2, tp_size=2, tp_rank=0))
    assert epoch_of(server) == 3


def test_another_release_that_asks_is_told_both_versions(server):
    register(server, info())
    response = get(server, {**RANK_0, "version": 3})
    assert response.status_code == 400
    assert f"version {PROTOCOL_VERSION} against 3" in response.text


def test_a_worker_that_is_no_prefill_worker_any_more_says_so_until_it_is_one_again(server, lookup):
    register(server, info(epoch=1))
    server.retire()
    decode = lookup()
    decode.ask(server.port)
    failure = decode.answer(server.port)
    assert isinstance(failure, LookupFailure)
    assert failure.is_definitive
    assert "410" in failure.message
    register(server, info(epoch=2, dp_size=2, dp_rank=1))
    assert get(server, RANK_0).status_code == 503
    register(server, info(epoch=3, dp_size=2))
    decode = lookup()
    decode.ask(server.port)
    assert decode.answer(server.port)[0].epoch == 3


@pytest.mark.parametrize(
    ("registration", "words"),
    [
        (info(version=99), f"version {PROTOCOL_VERSION} against 99"),
        (info(tp_rank=3, tp_size=2), "outside its sizes"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(server, registration, words):
    with pytest.raises(ConfigError, match=words):
        register(server, registration)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"version": 1}', b"\xff"])
def test_a_malformed_registration_is_400(server, body):
    assert put(server, body).status_code == 400


def test_a_server_that_comes_late_is_found(server, lookup):
    port = server.port
    server.close()
    decode = lookup()
    decode.ask(port)
    late = KVBootstrapServer("127.0.0.1", port, TOKEN)
    late.run()
    try:
        register(late, info(epoch=5))
        assert decode.answer(port)[0].epoch == 5
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
    assert [thread.name for thread in threading.enumerate()].count("kv-bootstrap") == 1


# -- authentication -----------------------------------------------------------------------------------------------


def test_a_request_without_a_proof_gets_a_challenge_and_nothing_else(server):
    register(server, info())
    url = f"http://127.0.0.1:{server.port}/route"
    for _ in range(2):
        response = httpx.get(url, params=RANK_0, trust_env=False)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"].startswith("Splitserve nonce=")
        assert "control_address" not in response.text
    assert httpx.put(url, content=msgspec.json.encode(info(epoch=9)), trust_env=False).status_code == 401
    assert epoch_of(server) == 1


@pytest.mark.parametrize("token", [b"", b"another token, not the cluster's"])
def test_another_token_is_refused_at_once_in_both_directions_and_both_sides_say_so(server, lookup, caplog, token):
    register(server, info(epoch=1))
    with pytest.raises(ConfigError, match="the cluster tokens differ, or one side has none: start all"):
        register(server, info(epoch=2), token)
    decode = lookup(token=token)
    decode.ask(server.port)
    failure = decode.answer(server.port)
    assert isinstance(failure, LookupFailure)
    assert failure.is_definitive
    assert (
        "the cluster tokens differ, or one side has none: start all workers with the same --cluster-token-file"
        in failure.message
    )
    assert epoch_of(server) == 1
    assert "the cluster tokens differ" in caplog.text
    assert TOKEN.decode() not in caplog.text


def test_a_proof_opens_once_and_for_its_request_alone(server):
    register(server, info())
    url = f"http://127.0.0.1:{server.port}/route"
    ours = get(server, RANK_0).request.headers["Authorization"]
    assert httpx.get(url, params=RANK_0, headers={"Authorization": ours}, trust_env=False).status_code == 401

    challenge = httpx.get(url, params=RANK_0, trust_env=False).headers["WWW-Authenticate"]
    proof = answer_challenge(TOKEN, challenge, "GET", "/route?tp_rank=0&pp_rank=0&dp_rank=0", b"")
    stolen = httpx.put(url, content=b"{}", headers={"Authorization": proof}, trust_env=False)
    assert stolen.status_code == 403


def test_a_server_without_a_token_and_a_client_with_one_do_not_talk(lookup):
    open_to_all = KVBootstrapServer("127.0.0.1", 0)
    open_to_all.run()
    try:
        register(open_to_all, info(), token=b"")
        decode = lookup()
        decode.ask(open_to_all.port)
        assert "the cluster tokens differ" in decode.answer(open_to_all.port).message
        assert get(open_to_all, RANK_0, token=b"").status_code == 200
    finally:
        open_to_all.close()


class Strange(httpx.MockTransport):
    """A server that sends stale challenges first, or requests a password."""

    def __init__(self, challenges):
        self.left = list(challenges)
        self.proofs = []
        super().__init__(self.handle)

    def handle(self, request):
        self.proofs.append(request.headers.get("Authorization"))
        if not self.left:
            return httpx.Response(200)
        return httpx.Response(401, headers={"WWW-Authenticate": self.left.pop(0)})


@pytest.mark.parametrize(
    ("challenges", "requests", "status"),
    [
        ([f'Splitserve nonce="{n:032x}"' for n in range(2)], 3, 200),
        ([f'Splitserve nonce="{n:032x}"' for n in range(9)], 3, 401),
        (['Basic realm="x"'], 1, 401),
        ([""], 1, 401),
    ],
)
def test_a_stale_challenge_is_answered_again_but_not_for_ever(challenges, requests, status):
    transport = Strange(challenges)
    with httpx.Client(transport=transport, auth=ClusterAuth(TOKEN)) as client:
        assert client.get("http://h/route").status_code == status
    assert len(transport.proofs) == len(set(transport.proofs)) == requests


def silent_connections(server, count, text=b""):
    """Connections that send `text` and nothing else; the stack that closes them."""
    stack = contextlib.ExitStack()
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE))
        with contextlib.suppress(OSError):
            sock.sendall(text)
    return stack


@pytest.mark.parametrize(
    "text",
    [b"", b"GET /route HT", b"GET /route?version=1 HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["silent", "half a request", "a request without a proof"],
)
def test_connections_without_a_proof_keep_no_worker_out(server, lookup, text):
    with silent_connections(server, 2 * pending.MAX_PENDING_PER_ADDRESS, text):
        register(server, info(epoch=77))
        decode = lookup()
        decode.ask(server.port)
        assert decode.answer(server.port) == [info(epoch=77)]
        assert len(server._server.pending) <= pending.MAX_PENDING_PER_ADDRESS


def test_a_connection_that_does_not_authenticate_is_closed_after_its_time(server, monkeypatch):
    monkeypatch.setattr(pending, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as sock:
        assert sock.recv(1) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as sock:
        # A body that is never sent.
        sock.sendall(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nAuthorization: x\r\n\r\n")
        assert sock.recv(1) == b""
    assert len(server._server.pending) == 0


def test_a_connection_that_has_authenticated_may_be_idle(server):
    register(server, info())
    url = f"http://127.0.0.1:{server.port}/route"
    with httpx.Client(auth=ClusterAuth(TOKEN), trust_env=False) as client:
        assert client.get(url, params=RANK_0).status_code == 200
        assert len(server._server.pending) == 0


def test_a_body_without_a_proof_is_not_read(server):
    url = f"http://127.0.0.1:{server.port}/route"
    assert httpx.put(url, content=b"x" * (64 << 10), trust_env=False).status_code == 401
