"""Records of the steps of a scheduler: what was computed together, and why other requests waited."""

from __future__ import annotations

import enum

import msgspec

# Maximum number of request ids in one record.
MAX_RIDS = 64
# Maximum number of records that a scheduler stores, and that one answer contains.
MAX_STEPS = 4096
# Kinds of steps.
DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"


class WaitReason(enum.StrEnum):
    """Reason why waiting requests were not in a step."""

    NONE = ""
    # The KV pool had too few pages, or the page table had no free row.
    KV_POOL = "kv_pool"
    # No metadata slot was free.
    METADATA_SLOTS = "metadata_slots"
    # The running batch was full.
    MAX_RUNNING = "max_running"
    # The step had its maximum number of tokens.
    BUDGET = "budget"
    # Retracted requests resume before new ones are admitted.
    RETRACTED = "retracted"


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    # Number of the step since the start of the scheduler, from 1.
    number: int
    # Seconds of the worker's monotonic clock.
    start: float
    end: float
    # DECODE, PREFILL or MIXED.
    kind: str
    num_requests: int
    # Requests among them that decoded. The others computed a prompt.
    num_decodes: int
    num_prompt_tokens: int
    # Maximum number of prompt tokens of the step. 0: no prompt was waiting to be computed.
    chunk_limit: int
    # Requests in the running batch, and waiting requests, when the step ended.
    num_running: int
    num_waiting: int
    reason: WaitReason = WaitReason.NONE
    # Ids of the first MAX_RIDS requests of the step.
    rids: list[str] = []


class ClockReading(msgspec.Struct, frozen=True):
    """Times of two clocks of a worker at the same moment."""

    # Seconds of the monotonic clock, and seconds since 1970.
    monotonic: float
    unix: float


class StepPage(msgspec.Struct, frozen=True):
    """Consecutive records of a scheduler, in the order of their numbers."""

    clock: ClockReading
    steps: list[StepRecord]
