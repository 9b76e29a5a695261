"""Records of the steps of a scheduler: what was computed together, and why other requests waited."""

from __future__ import annotations

import enum

import msgspec

# Ids of requests in one record.
MAX_RIDS = 64
# Steps that a scheduler keeps, and the most in one answer.
MAX_STEPS = 4096


class WaitReason(enum.StrEnum):
    """Why a request that waited was not in a step."""

    NONE = ""
    # The KV pool had too few pages, or the page table no row.
    KV_POOL = "kv_pool"
    # No metadata slot was free.
    METADATA_SLOTS = "metadata_slots"
    # The running batch was full.
    MAX_RUNNING = "max_running"
    # The step had as many tokens as it may have.
    BUDGET = "budget"
    # Retracted requests resume before new ones are admitted.
    RETRACTED = "retracted"


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    # Number since the start of the scheduler, from 1.
    number: int
    # Seconds of the worker's monotonic clock.
    start: float
    end: float
    # "decode", "prefill" or "mixed".
    kind: str
    num_requests: int
    # Of these, requests that generated a token after their first one.
    num_decodes: int
    num_prompt_tokens: int
    # Prompt tokens that the step could have had. 0: no prompt was there to compute.
    chunk_limit: int
    # Requests in the running batch and waiting ones, when the step ended.
    num_running: int
    num_waiting: int
    reason: WaitReason = WaitReason.NONE
    # The first MAX_RIDS of them.
    rids: list[str] = []


class ClockReading(msgspec.Struct, frozen=True):
    """One moment in two clocks of a worker."""

    # Seconds of its monotonic clock, and since 1970.
    monotonic: float
    unix: float


class StepPage(msgspec.Struct, frozen=True):
    """Part of a scheduler's records, in the order of their numbers."""

    clock: ClockReading
    steps: list[StepRecord]
