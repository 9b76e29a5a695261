from __future__ import annotations

import socket

import pytest

from splitserve import cli
from splitserve.core.clock import ManualClock
from splitserve.core.errors import ConfigError
from splitserve.ranks.launch import WorkerAddress, address_towards, settle_place

ROUTER = "http://127.0.0.1:8000"


def test_without_joining_everything_is_as_it_was():
    assert settle_place(None, None, None, [], None) == WorkerAddress("127.0.0.1", 30000, 8998, ())
    assert settle_place("10.0.0.5", 1, 2, ["http://r:1"], None) == WorkerAddress("10.0.0.5", 1, 2, ("http://r:1",))
    assert settle_place(None, 0, 0, [], None) == WorkerAddress("127.0.0.1", 0, 0, ())


def test_joining_takes_the_address_towards_the_router_and_free_ports():
    assert settle_place(None, None, None, [], ROUTER) == WorkerAddress("127.0.0.1", 0, 0, (ROUTER,), "127.0.0.1")
    # Every address, but one by which others find it.
    assert settle_place("0.0.0.0", 7, 8, [], ROUTER) == WorkerAddress("0.0.0.0", 7, 8, (ROUTER,), "127.0.0.1")
    # A given address is used as it is, even that of a remote router.
    assert settle_place("10.0.0.5", None, None, ["http://b:1"], "http://a:1") == WorkerAddress(
        "10.0.0.5", 0, 0, ("http://a:1", "http://b:1")
    )


def test_several_routers_may_be_joined():
    place = settle_place(None, None, None, [], f"{ROUTER},http://127.0.0.1:8001")
    assert place.router_urls == (ROUTER, "http://127.0.0.1:8001")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError):
        settle_place(None, None, None, [], url)


def test_a_network_that_is_not_up_yet_is_waited_for(monkeypatch):
    clock, tries = ManualClock(), []
    real = socket.getaddrinfo

    def lookup(host, *args):
        tries.append(host)
        if len(tries) < 4:
            raise socket.gaierror("Temporary failure in name resolution")
        return real("127.0.0.1", *args)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert address_towards("http://router:8000", now=clock.now, sleep=clock.advance) == "127.0.0.1"
    assert tries == ["router"] * 4


def test_a_router_without_a_way_to_it_is_an_error_in_the_end(monkeypatch):
    def lookup(*_):
        raise socket.gaierror("Name or service not known")

    clock = ManualClock()
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(ConfigError, match=r"--join http://router:8000: no way there .* name --host"):
        address_towards("http://router:8000", timeout=60.0, now=clock.now, sleep=clock.advance)
    assert clock.now() >= 60.0


def test_beyond_loopback_a_worker_joins_with_a_token_alone(monkeypatch, capsys):
    monkeypatch.setattr("splitserve.ranks.launch.address_towards", lambda url: "192.0.2.77")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "smollm2", "--disaggregation-mode", "decode", "--join", "http://192.0.2.1:8000"])
    assert ended.value.code == 2
    assert "192.0.2.77, which is no loopback address, without a cluster token" in capsys.readouterr().err
