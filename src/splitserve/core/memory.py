"""Memory that a worker can release while it does not serve, and the orders for it; `scheduler/memory.py`."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol

import msgspec

# Why a worker gets no requests, for the operators of its router.
MEMORY_RELEASED = "memory released: POST /resume_memory_occupation to it"


class MemoryTag(enum.StrEnum):
    """Part of a worker's memory; SGLang's names."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"


class MemoryStep(enum.StrEnum):
    """Orders to a scheduler."""

    # Load other weights beside those in use.
    LOAD = "load"
    # Replace the weights in use by the loaded ones.
    UPDATE = "update"
    # Drop the loaded weights.
    DISCARD = "discard"
    RELEASE = "release"
    RESUME = "resume"


class WeightsSource(msgspec.Struct, frozen=True):
    """Place of the weights of an update."""

    # Model as for `--model-path`, or name of the file in shared memory.
    name: str
    # Whether the file is a safetensors file in /dev/shm. Config and tokenizer are those of the current model.
    is_shared_memory: bool = False


class EngineMemory(Protocol):
    """Memory of one engine, on all its ranks. Not for two threads at a time.

    No step may run, except during `load` if `closes_role` is false.
    """

    # Whether the role must be drained before `load` and closed before `use`, because ranks follow the engine's orders.
    closes_role: bool

    @property
    def released(self) -> frozenset[MemoryTag]: ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights in use, or of those that were released."""
        ...

    def load(self, source: WeightsSource) -> None:
        """Load other weights beside those in use. Raises SplitserveError."""
        ...

    def use(self) -> None:
        """Replace the weights by the loaded ones. The old ones stay in memory for `undo`, until `confirm`."""
        ...

    def undo(self) -> None: ...

    def confirm(self) -> None:
        """Drop the old weights."""
        ...

    def discard(self) -> None:
        """Drop loaded weights that are not in use."""
        ...

    def release(self, tags: Collection[MemoryTag]) -> None:
        """Return memory to the system. The content of the KV pool is lost. Raises SplitserveError."""
        ...

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Make released memory usable again. Other tags are ignored. Raises SplitserveError."""
        ...
