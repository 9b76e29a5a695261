"""A process that answers nothing counts as ended, after several checks in a row."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.deploy import answer_watch
from splitserve.deploy.answer_watch import AnswerWatch
from splitserve.deploy.placer import Observation, Phase
from splitserve.process.lifecycle import ReadyInfo

DEADLINE = 60.0


def serving(pid: int) -> Observation:
    return Observation(phase=Phase.READY, pid=pid, ready=ReadyInfo(pid=pid, port=1, url=f"http://a:{pid}"))


class Answers:
    """Answers of one process in turn. After the last one a check waits without end."""

    def __init__(self, *answers: bool) -> None:
        self._left = list(answers)
        self.used = asyncio.Event()

    async def __call__(self, url: str, seconds: float) -> bool:
        if not self._left:
            self.used.set()
            await asyncio.Event().wait()
        return self._left.pop(0)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_watch, "_PAUSE", 0.0)


async def test_a_process_that_stops_answering_has_ended_until_it_is_another_one() -> None:
    watch, seen = AnswerWatch(Answers(True, False, False, False)), {"decode-0": serving(1)}
    async with asyncio.timeout(DEADLINE):
        while (found := watch.review(seen)["decode-0"]).phase is Phase.READY:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (found.phase, found.pid, found.detail) == (Phase.ENDED, 1, "answered no request for 30 s")
    # The next process loads first.
    loading = Observation(phase=Phase.LOADING, pid=2)
    assert watch.review({"decode-0": loading})["decode-0"] == loading
    assert watch.review({"decode-0": serving(2)})["decode-0"].phase is Phase.READY
    watch.close()


@pytest.mark.parametrize("answers", [(True, False, False, True, False, False), (False,) * 9])
async def test_a_process_that_answered_meanwhile_or_never_has_not_ended(answers: tuple[bool, ...]) -> None:
    script, seen = Answers(*answers), {"decode-0": serving(1)}
    watch = AnswerWatch(script)
    assert watch.review(seen) == seen
    await asyncio.wait_for(script.used.wait(), DEADLINE)
    assert watch.review(seen) == seen
    watch.close()


async def test_a_process_that_loads_or_has_ended_is_not_checked() -> None:
    watch = AnswerWatch(Answers())
    seen = {
        "decode-0": Observation(phase=Phase.LOADING, pid=1),
        "decode-1": Observation(phase=Phase.ENDED, detail="exited with code 1", exit_code=1),
    }
    assert watch.review(seen) == seen
    assert not watch._watches
