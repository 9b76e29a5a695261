"""Parts that a prefill or decode worker has and a colocated worker does not."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.transfer.manager import KVManager
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator


@dataclass(frozen=True, slots=True)
class HandOverKit:
    """Parts of a prefill or decode worker, opened by the launch layer and used by one role."""

    manager: KVManager
    metadata: MetadataBuffers
    slots: ReqToMetadataIdxAllocator
