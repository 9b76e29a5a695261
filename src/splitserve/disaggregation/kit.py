"""What a prefill or decode role needs beyond a colocated one, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.disaggregation.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.disaggregation.ports import ManagerPort


@dataclass(frozen=True, slots=True)
class HandOverKit:
    """Opened by the launch layer, used by one role."""

    manager: ManagerPort
    metadata: MetadataBuffers
    slots: ReqToMetadataIdxAllocator
