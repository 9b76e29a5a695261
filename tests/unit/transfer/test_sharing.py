"""Threads that share work: all have ended when it returns, and nothing that they raise is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve.core.errors import ConfigError
from splitserve.transfer.transports import base, same_host
from splitserve.transfer.transports.base import MAX_THREADS, TransportOptions, threads_of
from splitserve.transfer.transports.same_host import run_together

DEADLINE = 60.0


def test_the_first_runs_in_this_thread_and_the_others_beside_it():
    barrier, threads = threading.Barrier(3), []

    def work():
        threads.append(threading.get_ident())
        barrier.wait(DEADLINE)

    run_together([lambda: threads.insert(0, threading.get_ident()) or barrier.wait(DEADLINE), work, work])
    assert threads[0] == threading.get_ident()
    assert len(set(threads)) == 3


def test_one_alone_needs_no_other_thread(monkeypatch):
    monkeypatch.setattr(same_host, "ThreadPoolExecutor", None)
    threads = []
    run_together([lambda: threads.append(threading.get_ident())])
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_raises_is_raised_when_the_others_have_ended(failing):
    barrier, ended = threading.Barrier(2), []

    def fail():
        barrier.wait(DEADLINE)
        raise OSError("no more")

    def end():
        barrier.wait(DEADLINE)
        ended.append(True)

    with pytest.raises(OSError, match="no more"):
        run_together([fail, end] if failing == 0 else [end, fail])
    assert ended == [True]


def test_a_system_without_more_threads_leaves_the_work_to_the_first(monkeypatch):
    class NoMore(ThreadPoolExecutor):
        def submit(self, *args):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(same_host, "ThreadPoolExecutor", NoMore)
    store, done = [1, 2, 3], []

    def work():
        while store:
            done.append(store.pop())

    run_together([work, work])
    assert done == [3, 2, 1]


def test_threads_are_as_many_as_the_option_says_else_two_where_there_are_cores(monkeypatch):
    assert threads_of(TransportOptions(extra={"threads": str(MAX_THREADS)})) == MAX_THREADS
    for cores, expected in (({3}, 1), ({0, 1}, 2), (set(range(8)), 2)):
        monkeypatch.setattr(base.os, "sched_getaffinity", lambda pid, cores=cores: cores)
        assert threads_of(TransportOptions()) == expected
    for wrong in ("0", "65", "two", ""):
        with pytest.raises(ConfigError, match=f"threads={wrong}: a number from 1 to 64"):
            threads_of(TransportOptions(extra={"threads": wrong}))
