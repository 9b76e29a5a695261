"""The watch over deadlines: soonest first, each once, and nothing kept of what has ended."""

from splitserve.core.request import FinishReason, FinishType, Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.scheduler import Deadlines


def request_of(number, deadline) -> Request:
    return Request(f"r{number}", [1], ResolvedSampling(), number=number, deadline=deadline)


def test_what_has_expired_comes_once_and_soonest_first():
    deadlines = Deadlines()
    requests = [request_of(i, at) for i, at in enumerate((3.0, 1.0, None, 2.0))]
    for request in requests:
        deadlines.watch(request)
    assert deadlines.pop_expired(0.5) == []
    assert [r.rid for r in deadlines.pop_expired(2.0)] == ["r1", "r3"]
    assert deadlines.pop_expired(2.0) == []
    requests[0].finish = FinishReason(FinishType.LENGTH)
    assert deadlines.pop_expired(10.0) == []


def test_ended_requests_with_distant_deadlines_do_not_pile_up():
    deadlines = Deadlines()
    for number in range(5000):
        request = request_of(number, 1e9)
        deadlines.watch(request)
        request.finish = FinishReason(FinishType.LENGTH)
    assert len(deadlines) <= 1024
