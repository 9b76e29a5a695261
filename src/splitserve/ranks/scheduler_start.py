"""Configuration of one scheduler process: its front end writes it, the process reads it."""

from __future__ import annotations

import msgspec

from splitserve.core.config import WorkerConfig
from splitserve.core.parallel import ParallelRank
from splitserve.ranks.lockstep_channel import LockstepEndpoints
from splitserve.ranks.rank_channel import RankEndpoints


class SchedulerStart(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one scheduler process, sent as one line of JSON."""

    config: WorkerConfig
    # Resolved folder; config.model.model is the user's input.
    model_folder: str
    # ZMQ endpoints that the front end has bound.
    to_scheduler: str
    from_scheduler: str
    # On prefill workers: URL at which this worker's own bootstrap server accepts registrations.
    bootstrap_url: str | None = None
    # Rank of this process within the config's `dp_size` schedulers.
    rank: ParallelRank = ParallelRank()
    # Random number, equal for all ranks of this start of the worker.
    instance: int = 0
    # None: no group.
    endpoints: RankEndpoints | None = None
    # With data parallel attention; None: each scheduler computes its own steps.
    lockstep: LockstepEndpoints | None = None
    # Endpoint -> descriptor of a listener that this process has inherited.
    descriptors: dict[str, int] = {}
    # Named pipe to which this process sends heartbeats. None: they are not checked.
    heartbeat: str | None = None
