"""Stages at which a worker may be ordered to fail, with their places in the code.

The scheduler process reaches a stage when it calls a certain function, returns from it, or is halfway through it. Only
workers that were started for faults (`faulty.py`) wrap these functions.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

from splitserve.transfer.copies import cut, num_bytes

# Called when a stage is reached. It need not return.
Visit = Callable[["FaultStage"], None]


class FaultStage(enum.StrEnum):
    """Stage of one request, from the view of the worker that fails."""

    # The request waits for its computation (prefill) or its handshake (decode).
    QUEUED = "queued"
    # It waits for the pair's pages (prefill), or has just announced its own (decode).
    HANDSHAKE = "handshake"
    # A chunk of the prompt was computed (prefill), or its KV has arrived (decode).
    MID_CHUNK = "mid-chunk"
    # Half the bytes of a write were sent (prefill), or have arrived (decode).
    MID_TRANSFER = "mid-transfer"
    # All KV is in place, but no message about it has been sent yet.
    BEFORE_FIRST_TOKEN = "before-first-token"
    # Output tokens are sent.
    MID_STREAM = "mid-stream"


def install(visit: Visit) -> None:
    """Call `visit` at every stage of this process, whatever its role is and will be."""
    from splitserve.scheduler.roles.decode import DecodePreallocQueue, DecodeRole
    from splitserve.scheduler.roles.prefill import PrefillBootstrapQueue, PrefillEntry, PrefillRole
    from splitserve.scheduler.running import RunningSet
    from splitserve.transfer.receiver import KVReceiver
    from splitserve.transfer.transports import iovec

    _wrap(PrefillBootstrapQueue, "add", _after, visit, FaultStage.HANDSHAKE)
    _wrap(RunningSet, "add", _after, visit, FaultStage.QUEUED)
    _wrap(PrefillEntry, "send_chunk", _after, visit, FaultStage.MID_CHUNK)
    _wrap(PrefillRole, "_finish", _before, visit, FaultStage.BEFORE_FIRST_TOKEN)
    _wrap(PrefillRole, "finish_step", _after, visit, FaultStage.MID_STREAM)

    _wrap(DecodePreallocQueue, "add", _after, visit, FaultStage.QUEUED)
    _wrap(KVReceiver, "init", _after, visit, FaultStage.HANDSHAKE)
    _wrap(DecodeRole, "_take_in", _before, visit, FaultStage.BEFORE_FIRST_TOKEN)
    _wrap(DecodeRole, "finish_step", _after, visit, FaultStage.MID_STREAM)

    # Only `tcp` moves bytes with these functions.
    iovec.send_copies = _halved(iovec.send_copies, visit)
    iovec.receive_copies = _after(_halved(iovec.receive_copies, visit), visit, FaultStage.MID_CHUNK)


def _wrap(owner: type, name: str, how: Callable[..., Any], visit: Visit, stage: FaultStage) -> None:
    setattr(owner, name, how(getattr(owner, name), visit, stage))


def _after(function: Callable[..., Any], visit: Visit, stage: FaultStage) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        visit(stage)
        return result

    return wrapped


def _before(function: Callable[..., Any], visit: Visit, stage: FaultStage) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        visit(stage)
        return function(*args, **kwargs)

    return wrapped


def _halved(move: Callable[..., None], visit: Visit) -> Callable[..., None]:
    """Split `move(socket, copies, ...)` into two calls of about half the bytes, with the visit between.

    Only the first call passes on `head`.
    """

    @functools.wraps(move)
    def wrapped(sock: Any, copies: Any, *more: Any, **head: Any) -> None:
        pieces = cut(copies, max(1, num_bytes(copies) // 2))
        half = len(pieces) // 2
        move(sock, pieces[:half], *more, **head)
        visit(FaultStage.MID_TRANSFER)
        move(sock, pieces[half:], *more)

    return wrapped
