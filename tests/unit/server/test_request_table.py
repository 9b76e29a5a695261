from __future__ import annotations

import asyncio

import pytest

from splitserve.core.errors import CapacityError, InvalidRequestError, WorkerUnavailableError
from splitserve.server.front_end import RequestTable


async def test_places_are_held_while_the_context_is_open() -> None:
    table = RequestTable(2)
    with table.admit({"r": ("r-0", "r-1")}):
        assert table.num_open_samples == 2
        assert table.samples_of("r") == ("r-0", "r-1")
        assert table.samples_of("r-1") == ("r-1",)
        with pytest.raises(CapacityError, match="2 samples are open"), table.admit({"s": ("s",)}):
            pass
        with table.admit({"probe": ("probe",)}, is_probe=True):
            assert table.num_open_samples == 3
    assert table.num_open_samples == 0
    assert table.samples_of("r") == ()


@pytest.mark.parametrize("names", [{"r": ("x",)}, {"x": ("r-0",)}, {"a": ("a", "a")}])
async def test_an_id_that_runs_already_is_refused(names: dict[str, tuple[str, ...]]) -> None:
    table = RequestTable(9)
    with (
        table.admit({"r": ("r-0",)}),
        pytest.raises(InvalidRequestError, match="another rid"),
        table.admit(names),
    ):
        pass


async def test_draining_refuses_new_requests_and_waits_for_the_running() -> None:
    table = RequestTable(9)
    with table.admit({"r": ("r",)}):
        table.is_draining = True
        with pytest.raises(WorkerUnavailableError, match="draining"), table.admit({"s": ("s",)}):
            pass
        assert not await table.wait_idle(0.001)
        waiting = asyncio.create_task(table.wait_idle(10.0))
    assert await waiting
