from __future__ import annotations

import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs, PrefillConfig, parse_url
from splitserve.router.register import PDRegistryRequest
from splitserve.router.registry import FORGET_AFTER, WorkerRegistry
from splitserve.router.worker import LOST, Worker, WorkerPair

PREFILL, DECODE, NULL = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL


def registry(*workers: tuple[str, DisaggregationMode], clock: ManualClock | None = None) -> WorkerRegistry:
    result = WorkerRegistry(clock=clock)
    for url, mode in workers:
        result.add(url, mode, 8998 if mode is PREFILL else None)
    return result


def chosen(target: WorkerPair | Worker) -> tuple[str, ...]:
    return (target.url,) if isinstance(target, Worker) else (target.prefill.url, target.decode.url)


def test_round_robin_takes_each_pool_in_turn() -> None:
    r = registry(("p1", PREFILL), ("p2", PREFILL), ("d1", DECODE), ("d2", DECODE), ("d3", DECODE))
    pairs = [chosen(r.select()) for _ in range(6)]
    assert [p for p, _ in pairs] == ["p1", "p2"] * 3
    assert [d for _, d in pairs] == ["d1", "d2", "d3"] * 2


@pytest.mark.parametrize(
    ("workers", "missing", "roles"),
    [
        ((), "no prefill worker is registered and no decode worker is registered", "prefill,decode"),
        ((("p", PREFILL),), "no decode worker is registered", "decode"),
        ((("d", DECODE),), "no prefill worker is registered", "prefill"),
    ],
)
def test_a_missing_kind_of_worker_is_named(
    workers: tuple[tuple[str, DisaggregationMode], ...], missing: str, roles: str
) -> None:
    with pytest.raises(WorkerUnavailableError, match=missing) as caught:
        registry(*workers).select()
    assert caught.value.param == roles


def test_colocated_workers_serve_where_there_is_no_pair() -> None:
    r = registry(("n", NULL))
    assert chosen(r.select()) == ("n",)
    r.add("p", PREFILL, 1)
    assert chosen(r.select()) == ("n",)
    r.add("d", DECODE)
    assert chosen(r.select()) == ("p", "d")


def test_an_unhealthy_worker_is_passed_over_until_it_registers_again() -> None:
    r = registry(("p", PREFILL), ("d1", DECODE), ("d2", DECODE))
    for worker in r.pool(DECODE):
        worker.mark_unhealthy()
    with pytest.raises(WorkerUnavailableError, match="none of the 2 decode worker"):
        r.select()
    assert r.add("d2", DECODE) is False
    assert chosen(r.select()) == ("p", "d2")


def test_a_worker_that_hangs_does_not_become_healthy_by_a_registration_of_its_front_end() -> None:
    r = registry(("p", PREFILL), ("d", DECODE))
    worker = r.get("d")
    worker.break_off("hangs", is_hung=True)
    worker.mark_unhealthy()
    r.add("d", DECODE)
    assert not worker.healthy
    worker.heartbeat()
    r.add("d", DECODE)
    assert worker.healthy


class Waiting:
    """Call."""

    def fail(self, error: Exception) -> None: ...


def test_a_worker_that_leaves_is_listed_until_our_requests_there_have_ended() -> None:
    r = registry(("p", PREFILL), ("d1", DECODE), ("d2", DECODE), ("d3", DECODE))
    leaver, call = r.get("d1"), Waiting()
    leaver.calls.add(call)
    assert r.deregister("d1")
    (leaving,) = (w for w in r.all() if w.drains)
    assert (leaving.url, str(leaving.unready_reason).partition(":")[0]) == ("d1", "it was removed or deregistered")
    assert {chosen(r.select()) for _ in range(6)} == {("p", "d2"), ("p", "d3")}
    r.forget_gone()
    assert r.get("d1") is leaver
    leaver.calls.remove(call)
    r.forget_gone()
    # One without requests is removed at once.
    assert r.deregister("d2")
    assert [w.url for w in r.pool(DECODE)] == ["d3"]
    assert not r.deregister("d2")


@pytest.mark.parametrize("order", ["deregister", "remove"])
def test_a_worker_that_left_and_comes_back_keeps_its_requests_and_is_in_doubt(order: str) -> None:
    """A new object would not be checked for a hang on behalf of these requests, and would not count them."""
    r = WorkerRegistry(LBArgs())
    r.add("d", DECODE)
    leaver, call = r.get("d"), Waiting()
    leaver.forgive()
    leaver.calls.add(call)
    leaver.is_draining = True
    assert getattr(r, order)("d")
    assert (r.get("d"), leaver.takes_requests) == (leaver, False)
    assert r.add("d", DECODE)
    assert (r.get("d"), leaver.num_running, leaver.takes_requests) == (leaver, 1, True)
    # It may be another process now.
    assert leaver.unready_reason == LOST
    assert r.add("d", DECODE) is False
    leaver.calls.remove(call)
    r.forget_gone()
    assert r.all() == [leaver]


def test_a_reason_for_leaving_is_forgotten_when_the_worker_returns() -> None:
    r = registry(("d", DECODE))
    r.get("d").calls.add(Waiting())
    r.deregister("d", "its weights change")
    r.add("d", DECODE)
    assert r.left == {}


def test_a_removed_worker_is_forgotten_when_its_requests_have_ended() -> None:
    r = WorkerRegistry()
    r.add("d", DECODE, is_static=True)
    worker, call = r.get("d"), Waiting()
    worker.calls.add(call)
    r.remove("d")
    assert str(worker.unready_reason).startswith("it was removed or deregistered")
    worker.calls.remove(call)
    r.forget_gone()
    assert r.all() == []


def test_a_worker_that_stays_away_is_checked_while_it_has_requests() -> None:
    clock = ManualClock()
    r = registry(("d", DECODE), clock=clock)
    worker, call = r.get("d"), Waiting()
    worker.calls.add(call)
    worker.mark_unhealthy()
    clock.advance(FORGET_AFTER)
    r.forget_gone()
    assert r.all() == [worker]
    worker.calls.remove(call)
    r.forget_gone()
    assert r.all() == []


def test_a_registered_worker_that_stays_away_is_forgotten_and_a_given_one_is_not() -> None:
    clock = ManualClock()
    r = registry(("d1", DECODE), clock=clock)
    r.add("d2", DECODE, is_static=True)
    for worker in r.all():
        worker.mark_unhealthy()
    clock.advance(FORGET_AFTER - 1)
    r.forget_gone()
    assert [w.url for w in r.all()] == ["d1", "d2"]
    clock.advance(1)
    r.forget_gone()
    assert [w.url for w in r.all()] == ["d2"]


def test_a_worker_may_come_back_in_another_role() -> None:
    r = registry(("w", DECODE))
    assert r.add("w", PREFILL, 8998) is True
    assert r.pool(DECODE) == []
    assert r.pool(PREFILL)[0].bootstrap_port == 8998


def test_removing_a_worker_twice_is_harmless() -> None:
    r = registry(("w", DECODE))
    assert r.remove("w") is True
    assert r.remove("w") is False


@pytest.mark.parametrize(
    ("mode", "port", "message"),
    [
        ("prefill", None, "must give its bootstrap_port"),
        ("prefill", 70000, "must give its bootstrap_port"),
        ("decode", 8998, "must not have a bootstrap_port"),
        ("null", 8998, "must not have a bootstrap_port"),
    ],
)
def test_a_registration_with_the_wrong_port_is_refused(mode: str, port: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PDRegistryRequest.model_validate({"mode": mode, "registry_url": "http://h:1", "bootstrap_port": port})


def test_a_registration_must_name_a_url() -> None:
    with pytest.raises(ValueError, match="not the URL of a worker or router"):
        PDRegistryRequest.model_validate({"mode": "decode", "registry_url": "h:1"})


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "h." + "a" * 64 + ".com", ".b"])
def test_a_host_name_that_no_name_server_accepts_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"is not the URL of a worker or router: write http://HOST:PORT"):
        parse_url(f"http://{host}:80")


@pytest.mark.parametrize("host", ["a" * 63, "h_1.b.", "10.0.0.1", "[::1]", "[fe80::1%25eth0]", "bücher.example"])
def test_other_host_names_are_accepted(host: str) -> None:
    assert parse_url(f"http://{host}:80/") == f"http://{host}:80"


@pytest.mark.parametrize(
    ("text", "port"),
    [("http://h:1", None), ("http://h:1/ 8998", 8998), ("http://h:1 none", None), ("http://h:1 None", None)],
)
def test_a_prefill_option_has_an_optional_bootstrap_port(text: str, port: int | None) -> None:
    assert PrefillConfig.parse(text) == PrefillConfig("http://h:1", port)


@pytest.mark.parametrize("text", ["", "h:1", "http://h:1 x", "http://h:1 0", "http://h:1 99999", "http://h:1 1 2"])
def test_a_malformed_prefill_option_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        PrefillConfig.parse(text)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="--policy"):
        LBArgs(policy="fastest")
