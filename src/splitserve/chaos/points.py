"""The stages at which a worker may be made to fail, and where in the code each of them is.

A stage is met in the scheduler's process when a certain function is called there (or has returned, or is half done).
Those functions are wrapped in workers that were started for it (`faulty.py`); all others know nothing of this.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

from splitserve.disaggregation.copies import cut, num_bytes

# What is to happen where a stage is met; it need not return.
Visit = Callable[["Stage"], None]


class Stage(enum.StrEnum):
    """Of one request, as the worker that fails sees it."""

    # It stands in line: to be computed (prefill), to shake hands (decode).
    QUEUED = "queued"
    # Waits for the pair's pages (prefill), has just announced its own (decode).
    HANDSHAKE = "handshake"
    # A chunk of the prompt is computed (prefill), its KV has come (decode).
    MID_CHUNK = "mid-chunk"
    # Half the bytes of a write are sent (prefill), or in place (decode).
    MID_TRANSFER = "mid-transfer"
    # All KV is in place, which nobody was told yet.
    BEFORE_FIRST_TOKEN = "before-first-token"
    # Tokens come.
    MID_STREAM = "mid-stream"


def install(visit: Visit) -> None:
    """Have `visit` called at every stage of this process, whatever its role is and will be."""
    from splitserve.disaggregation.decode import DecodePreallocQueue
    from splitserve.disaggregation.prefill import PrefillBootstrapQueue, PrefillEntry
    from splitserve.disaggregation.receiver import KVReceiver
    from splitserve.disaggregation.transports import iovec
    from splitserve.scheduler.roles.decode import DecodeRole
    from splitserve.scheduler.roles.prefill import PrefillRole
    from splitserve.scheduler.running import RunningSet

    _wrap(PrefillBootstrapQueue, "add", _after, visit, Stage.HANDSHAKE)
    _wrap(RunningSet, "add", _after, visit, Stage.QUEUED)
    _wrap(PrefillEntry, "send_chunk", _after, visit, Stage.MID_CHUNK)
    _wrap(PrefillRole, "_finish", _before, visit, Stage.BEFORE_FIRST_TOKEN)
    _wrap(PrefillRole, "finish_step", _after, visit, Stage.MID_STREAM)

    _wrap(DecodePreallocQueue, "add", _after, visit, Stage.QUEUED)
    _wrap(KVReceiver, "init", _after, visit, Stage.HANDSHAKE)
    _wrap(DecodeRole, "_take_in", _before, visit, Stage.BEFORE_FIRST_TOKEN)
    _wrap(DecodeRole, "finish_step", _after, visit, Stage.MID_STREAM)

    # Only `tcp` moves bytes by these.
    iovec.send_copies = _halved(iovec.send_copies, visit)
    iovec.receive_copies = _after(_halved(iovec.receive_copies, visit), visit, Stage.MID_CHUNK)


def _wrap(owner: type, name: str, how: Callable[..., Any], visit: Visit, stage: Stage) -> None:
    setattr(owner, name, how(getattr(owner, name), visit, stage))


def _after(function: Callable[..., Any], visit: Visit, stage: Stage) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        visit(stage)
        return result

    return wrapped


def _before(function: Callable[..., Any], visit: Visit, stage: Stage) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        visit(stage)
        return function(*args, **kwargs)

    return wrapped


def _halved(move: Callable[..., None], visit: Visit) -> Callable[..., None]:
    """`move(socket, copies, ...)` in two calls of about half the bytes, with the visit between; a head in the first."""

    @functools.wraps(move)
    def wrapped(sock: Any, copies: Any, *more: Any, **head: Any) -> None:
        pieces = cut(copies, max(1, num_bytes(copies) // 2))
        half = len(pieces) // 2
        move(sock, pieces[:half], *more, **head)
        visit(Stage.MID_TRANSFER)
        move(sock, pieces[half:], *more)

    return wrapped
