"""Orders between steps from a driver to its followers: open and close the KV transfer, change the memory.

They use the pipe of the steps, so every rank executes them between the same steps.
"""

from __future__ import annotations

import enum

import msgspec

from splitserve.core.errors import EngineError
from splitserve.core.memory import MemoryTag

# First bytes of these orders. No step begins with them: 0xc1 begins no msgpack message, and marks steps of a draft
# model, which is a message.
_MARK = b"\xc1\xc1"


class RankMemoryStep(enum.StrEnum):
    """What each rank does to its memory: a method of BuiltEngineMemory."""

    LOAD = "load"
    USE = "use"
    UNDO = "undo"
    CONFIRM = "confirm"
    DISCARD = "discard"
    RELEASE = "release"
    RESUME = "resume"


class OpenTransfer(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Open the KV transfer of the worker's role."""

    # Number of the links to use, from 0.
    number: int
    # Random number, equal for all ranks of one opening.
    instance: int
    bootstrap_url: str | None


class CloseTransfer(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Close the KV transfer. No rank holds a room."""


class ChangeMemory(msgspec.Struct, frozen=True, array_like=True, tag="memory"):
    """Take a step of a change of the memory, then exchange outcomes with all ranks."""

    step: RankMemoryStep
    tags: frozenset[MemoryTag] = frozenset()
    # Model to load, and whether it is a folder around weights in shared memory.
    model: str = ""
    is_shared_memory: bool = False


GroupOrder = OpenTransfer | CloseTransfer | ChangeMemory
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[GroupOrder] = msgspec.msgpack.Decoder(GroupOrder)


def encode_order(order: GroupOrder) -> bytes:
    return _MARK + _encoder.encode(order)


def group_order_in(data: bytes) -> GroupOrder | None:
    """Return the order. None: it is an order of another kind. Raises EngineError if it cannot be read."""
    if not data.startswith(_MARK):
        return None
    try:
        return _decoder.decode(data[len(_MARK) :])
    except msgspec.MsgspecError as error:
        raise EngineError(f"an order of the driver cannot be read: {error}") from error
