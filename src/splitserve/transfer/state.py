"""States of a room's KV transfer, one table per side.

`RoomState` is the state of one rank's end of a room. `SENDER` (prefill) and `RECEIVER` (decode) list all legal moves.
`KVPoll` is the part of it that the scheduler depends on. It is ordered, so that ranks agree by taking the minimum.

| situation | on prefill (sender) | on decode (receiver) |
|---|---|---|
| EARLY | decode sent messages, but the request has not arrived | - |
| REFUSED | the room failed before its request arrived | - |
| BOOTSTRAPPING | not all decode ranks have announced their pages | looking up the prefill worker, handshake |
| WAITING_FOR_INPUT | decode's pages are known | handshake done: pages may be announced |
| TRANSFERRING | a chunk was sent | pages announced: on loan to prefill |
| SUCCESS | all bytes proven in place | all bytes and the metadata row in place |
| STOPPING | failed, writes in flight | failed, pages still on loan |
| FAILED | failed, no write in flight | failed, no page on loan |
| CLOSED | cleared by the scheduler; its result answers late messages | cleared by the scheduler |
"""

from __future__ import annotations

import enum


class KVPoll(enum.IntEnum):
    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class RoomState(enum.Enum):
    EARLY = enum.auto()
    REFUSED = enum.auto()
    BOOTSTRAPPING = enum.auto()
    WAITING_FOR_INPUT = enum.auto()
    TRANSFERRING = enum.auto()
    SUCCESS = enum.auto()
    STOPPING = enum.auto()
    FAILED = enum.auto()
    CLOSED = enum.auto()


class KVEvent(enum.StrEnum):
    # Prefill: the request arrived.
    OPENED = "opened"
    # The handshake is done (receiver), or the pages of all decode ranks are known (sender).
    PAIRED = "paired"
    # Pages announced (receiver), or first chunk queued for the transport (sender).
    STARTED = "started"
    # All bytes and the metadata row proven in place.
    COMPLETED = "completed"
    # Any failure, on either end.
    FAILED = "failed"
    # After a failure: no write is in flight any more (sender), or all loans have ended (receiver).
    SETTLED = "settled"
    # The scheduler forgets the room.
    CLEARED = "cleared"


Table = dict[RoomState, dict[KVEvent, RoomState]]

# Moves after the end. A late failure changes nothing: Success and Failed are sticky.
_ENDS: Table = {
    RoomState.SUCCESS: {KVEvent.FAILED: RoomState.SUCCESS, KVEvent.CLEARED: RoomState.CLOSED},
    RoomState.STOPPING: {KVEvent.FAILED: RoomState.STOPPING, KVEvent.SETTLED: RoomState.FAILED},
    RoomState.FAILED: {KVEvent.FAILED: RoomState.FAILED, KVEvent.CLEARED: RoomState.CLOSED},
    RoomState.CLOSED: {KVEvent.FAILED: RoomState.CLOSED},
}
# Moves of both sides from the request to the end.
_MAIN: Table = {
    RoomState.BOOTSTRAPPING: {KVEvent.PAIRED: RoomState.WAITING_FOR_INPUT, KVEvent.FAILED: RoomState.FAILED},
    RoomState.WAITING_FOR_INPUT: {KVEvent.STARTED: RoomState.TRANSFERRING, KVEvent.FAILED: RoomState.FAILED},
    RoomState.TRANSFERRING: {KVEvent.COMPLETED: RoomState.SUCCESS, KVEvent.FAILED: RoomState.STOPPING},
}
# The first state of a table is the initial one.
RECEIVER: Table = _MAIN | _ENDS
SENDER: Table = {
    RoomState.EARLY: {KVEvent.OPENED: RoomState.BOOTSTRAPPING, KVEvent.FAILED: RoomState.REFUSED},
    RoomState.REFUSED: {KVEvent.OPENED: RoomState.FAILED, KVEvent.FAILED: RoomState.REFUSED},
    **RECEIVER,
}

# What the scheduler polls in each state. A closed room keeps its last value.
POLL: dict[RoomState, KVPoll] = {
    RoomState.EARLY: KVPoll.BOOTSTRAPPING,
    RoomState.REFUSED: KVPoll.FAILED,
    RoomState.BOOTSTRAPPING: KVPoll.BOOTSTRAPPING,
    RoomState.WAITING_FOR_INPUT: KVPoll.WAITING_FOR_INPUT,
    RoomState.TRANSFERRING: KVPoll.TRANSFERRING,
    RoomState.SUCCESS: KVPoll.SUCCESS,
    RoomState.STOPPING: KVPoll.FAILED,
    RoomState.FAILED: KVPoll.FAILED,
}


class IllegalTransition(RuntimeError):
    """Error for a transition that is not in the table: a bug."""


def advance(table: Table, state: RoomState, event: KVEvent) -> RoomState:
    """Return the state after `event`. Raises IllegalTransition if the table has no entry."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(f"room state {state.name} has no move for {event.value!r}") from None


def diagram(table: Table) -> str:
    """Return the table as a Mermaid state diagram, for docs/transfer.md, without transitions to the same state."""
    names = {state: state.name.title().replace("_", "") for state in table}
    lines = ["stateDiagram-v2", f"    [*] --> {names[next(iter(table))]}"]
    lines += [
        f"    {names[state]} --> {names[target]}: {event.value}"
        for state, moves in table.items()
        for event, target in moves.items()
        if target is not state
    ]
    return "\n".join([*lines, f"    {names[RoomState.CLOSED]} --> [*]"]) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(f"Sender:\n\n{diagram(SENDER)}\nReceiver:\n\n{diagram(RECEIVER)}")
