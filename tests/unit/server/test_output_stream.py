"""Outputs of one request and their reader, which may be slow or cancelled."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.core.batch import TokenLogprob
from splitserve.core.messages import TokenOutput
from splitserve.server.scheduler_client import OutputStream


# How many turns of the loop lie between an output and the cancel: at some point it is there, and not yet read.
@pytest.mark.parametrize("turns", range(6))
async def test_a_cancel_that_comes_with_an_output_is_not_lost(turns: int) -> None:
    given_up: list[str] = []
    stream = OutputStream(["r"], given_up.extend)

    async def read() -> None:
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.put(TokenOutput(rid="r", token_ids=[1]))
    for _ in range(turns):
        await asyncio.sleep(0)
    reader.cancel()
    _, waiting = await asyncio.wait({reader}, timeout=60.0)
    if waiting:
        reader.cancel()
        await asyncio.wait({reader})
    assert not waiting
    assert reader.cancelled()
    assert given_up == ["r"]


async def test_outputs_that_were_not_read_are_merged_with_all_that_belongs_to_their_tokens() -> None:
    stream = OutputStream(["r"], lambda _: None)
    for token in (1, 2):
        logprob = TokenLogprob(token, -float(token))
        stream.put(TokenOutput(rid="r", token_ids=[token], logprobs=[logprob], hidden_states=[bytes([token])]))
    merged = await anext(aiter(stream))
    assert merged.token_ids == [1, 2]
    assert [logprob.logprob for logprob in merged.logprobs] == [-1.0, -2.0]
    assert merged.hidden_states == [b"\x01", b"\x02"]
    stream.close()
