"""The transport without a peer: the time that its link takes, and the contract's rules about tickets and sessions."""

import threading

import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import check_options, create_transport
from splitserve.transfer.transports.base import TransportOptions, WriteState
from splitserve.transfer.transports.fake import FakeLink, FakeTransport, bandwidth_of, delay_of

N = 1000
# Nothing reads the memory, so its address may be invalid.
MEMORY = Region(64, N)
WHOLE = copy_table([(0, 0, 0, 0, N)])


@pytest.fixture
def clock():
    return ManualClock(100.0)


def opened(transport):
    transport.register([MEMORY])
    return transport.open_session()


def test_writes_share_the_link_and_each_has_the_delay():
    link = FakeLink(bandwidth=100.0, delay=3.0)
    assert link.carry(10.0, 200) == 15.0
    # The second one waits for the link, not for the delay of the first.
    assert link.carry(11.0, 100) == 16.0
    assert link.carry(20.0, 0) == 23.0


def test_a_write_is_done_when_the_link_has_carried_its_bytes(clock):
    transport = FakeTransport(FakeLink(bandwidth=500.0, delay=1.0), clock=clock)
    session = opened(transport)
    tickets = [transport.write(session, WHOLE) for _ in range(2)]
    clock.advance(2.99)
    assert [transport.poll(ticket).state for ticket in tickets] == [WriteState.PENDING] * 2
    clock.advance(0.01)
    assert [transport.poll(ticket).state for ticket in tickets] == [WriteState.DONE, WriteState.PENDING]
    clock.advance(2.0)
    assert transport.poll(tickets[1]).state is WriteState.DONE
    with pytest.raises(KeyError):
        transport.poll(tickets[1])
    transport.close()


def test_without_options_a_write_is_done_at_once():
    progress = []
    transport = create_transport("fake", TransportOptions(on_progress=lambda: progress.append(1)))
    ticket = transport.write(opened(transport), WHOLE)
    assert (transport.poll(ticket).state, progress) == (WriteState.DONE, [1])
    transport.close()
    transport.close()


def test_a_poller_is_woken_when_a_slow_write_is_in_place():
    woken = threading.Event()
    transport = create_transport("fake", TransportOptions(on_progress=woken.set, extra={"delay": "5"}))
    ticket = transport.write(opened(transport), WHOLE)
    assert woken.wait(30)
    assert transport.poll(ticket).state is WriteState.DONE
    transport.close()


def test_a_drained_session_fails_its_writes_and_is_fenced(clock):
    transport = FakeTransport(FakeLink(delay=1.0), clock=clock)
    session = opened(transport)
    before = transport.write(session, WHOLE)
    assert not transport.is_fenced(session.session_id)
    transport.drain(session.session_id)
    assert transport.is_fenced(session.session_id)
    after = transport.write(session, WHOLE)
    for ticket in (before, after):
        status = transport.poll(ticket)
        assert status.state is WriteState.FAILED
        assert "drained" in status.error
    transport.close()


def test_a_source_outside_our_memory_is_an_error(clock):
    transport = FakeTransport(FakeLink(), clock=clock)
    with pytest.raises(ValueError, match="source of a copy"):
        transport.write(opened(transport), copy_table([(0, 1, 0, 0, N)]))


def test_options_have_units():
    assert (bandwidth_of("12.5"), delay_of("0.5")) == (12.5e9, 0.0005)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": "0"}, "--transfer-option bandwidth=0: a number of GB/s"),
        ({"bandwidth": "fast"}, "--transfer-option bandwidth=fast: a number of GB/s"),
        ({"delay": "-1"}, "--transfer-option delay=-1: a number of milliseconds"),
        ({"delay": "inf"}, "--transfer-option delay=inf: a number of milliseconds"),
        ({"speed": "1"}, "it takes bandwidth, delay"),
    ],
)
def test_bad_options_are_refused_before_a_worker_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        check_options("fake", options)
