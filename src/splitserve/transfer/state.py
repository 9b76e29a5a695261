"""KVPoll: state of one room's KV transfer, as a table. Ordered, so that ranks agree by taking the minimum."""

from __future__ import annotations

import enum


class KVPoll(enum.IntEnum):
    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class KVEvent(enum.StrEnum):
    # The handshake is done (receiver), or the peer's pages are known (sender).
    PAIRED = "paired"
    # Pages announced (receiver), or first chunk queued for the transport (sender).
    STARTED = "started"
    # All bytes and the metadata row proven in place.
    COMPLETED = "completed"
    # Any failure, on either end.
    FAILED = "failed"


TRANSITIONS: dict[KVPoll, dict[KVEvent, KVPoll]] = {
    KVPoll.BOOTSTRAPPING: {
        KVEvent.PAIRED: KVPoll.WAITING_FOR_INPUT,
        KVEvent.FAILED: KVPoll.FAILED,
    },
    KVPoll.WAITING_FOR_INPUT: {
        KVEvent.STARTED: KVPoll.TRANSFERRING,
        KVEvent.FAILED: KVPoll.FAILED,
    },
    KVPoll.TRANSFERRING: {
        KVEvent.COMPLETED: KVPoll.SUCCESS,
        KVEvent.FAILED: KVPoll.FAILED,
    },
    # Final states: a late failure of a finished KV transfer changes nothing, and Failed is sticky.
    KVPoll.SUCCESS: {KVEvent.FAILED: KVPoll.SUCCESS},
    KVPoll.FAILED: dict.fromkeys(KVEvent, KVPoll.FAILED),
}


class IllegalTransition(RuntimeError):
    """Error for a transition that is not in the table: a bug."""


def advance(state: KVPoll, event: KVEvent) -> KVPoll:
    """Return the state after `event`. Raises IllegalTransition if the table has no entry."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"KVPoll {state.name} has no move for {event.value!r}") from None


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for docs/transfer.md, without transitions to the same state."""
    names = {state: state.name.title().replace("_", "") for state in KVPoll}
    lines = ["stateDiagram-v2", f"    [*] --> {names[KVPoll.BOOTSTRAPPING]}"]
    lines += [
        f"    {names[state]} --> {names[target]}: {event.value}"
        for state, moves in TRANSITIONS.items()
        for event, target in moves.items()
        if target is not state
    ]
    lines += [f"    {names[state]} --> [*]" for state in (KVPoll.SUCCESS, KVPoll.FAILED)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(diagram())
