"""A loop in a thread, where its start is interrupted."""

from __future__ import annotations

import threading

import pytest

from splitserve.process.threads import LoopThread


def test_a_start_that_is_interrupted_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LoopThread("interrupted")
    started[0].join(timeout=30)
    assert not started[0].is_alive()
