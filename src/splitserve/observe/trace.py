"""Trace of one request over all processes: its stages, and the share of each in the time to the first byte.

Stages of different workers overlap: decode waits while prefill computes. `set_exclusive_times` gives every moment to
one stage only, the one that explains it best. So exclusive times add up to the time to the first byte, except for
moments in which no stage was open: these are reported as unaccounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from splitserve.core.timeline import Attribute, Stage

# Stages in order of precedence: a moment belongs to the first one that is open. Work on the prompt precedes waits. A
# wait for a resource precedes the wait of the peer for this worker. A streamed first token is on its way to the
# client while its sample decodes, so these stages precede decode. The router's stages come last.
PRECEDENCE = (
    Stage.PREFILL_CHUNK,
    Stage.TRANSFER,
    Stage.METADATA,
    Stage.GRAMMAR,
    Stage.TOKENIZE,
    Stage.TO_SCHEDULER,
    Stage.HANDSHAKE,
    Stage.PREALLOC,
    Stage.BOOTSTRAP,
    Stage.WAITING,
    Stage.TO_FRONT_END,
    Stage.DETOKENIZE,
    Stage.RESPONSE_NETWORK,
    Stage.RETRACTED,
    Stage.PREBUILT,
    Stage.DECODE,
    Stage.BETWEEN_STEPS,
    Stage.TRANSFER_DONE,
    Stage.KV_WAIT,
    Stage.REQUEST_NETWORK,
    Stage.CLIENT_NETWORK,
    Stage.ROUTER_RECEIVE,
    Stage.ROUTER_QUEUE,
    Stage.ROUTER_CHOOSE,
    Stage.ROUTER_DISPATCH,
    Stage.ROUTER_FORWARD,
    Stage.UNREPORTED,
    Stage.FAILED_ATTEMPT,
)
_RANK = {str(stage): rank for rank, stage in enumerate(PRECEDENCE)}
# Stages in which the prefill worker writes its own answer. The client does not wait for it.
_PREFILL_ANSWER = (Stage.TO_FRONT_END, Stage.DETOKENIZE, Stage.RESPONSE_NETWORK)


class TraceStage(msgspec.Struct):
    """Time of one process in one stage."""

    name: str
    # "router", "prefill", "decode", "null" or "network".
    where: str
    # URL of the worker. Empty: the router.
    worker: str
    # Milliseconds since the start of the trace.
    start_ms: float
    end_ms: float
    # Milliseconds of the time to the first byte that belong to this stage alone.
    exclusive_ms: float = 0.0
    before_first_token: bool = False
    attributes: dict[str, Attribute] = {}


class ClockOffset(msgspec.Struct):
    """Estimated offset of a worker's clock: its time minus the router's."""

    worker: str
    offset_ms: float
    # Maximum error of the offset. 0: both use the same clock.
    error_ms: float


class TraceSummary(msgspec.Struct, gc=False):
    rid: str
    # The client's own id, from the header x-request-id. Empty: it sent none.
    request_id: str
    trace_id: str
    route: str
    # HTTP status. 0: the request is running.
    status: int
    # Code of the error. Empty: there was none.
    error: str
    # "waiting" (at the router), "running" (on workers: in their queues, or in steps) or "done".
    state: str
    # Seconds since 1970.
    started_at: float
    # Time from the start to the first byte of the answer, for a stream to its first token. None: no byte was sent.
    ttft_ms: float | None
    e2e_ms: float
    prompt_tokens: int | None
    output_tokens: int | None
    num_cached_tokens: int | None
    retries: int
    migrations: int
    # Role -> URL of the workers of the last attempt.
    workers: dict[str, str]
    # Event that starts the trace. "client": the client sent the request, by its header x-request-start. "router": the
    # router received it. "ignored": the same, because the header was malformed, in the future or too old.
    start: str = "router"


class TraceReport(TraceSummary, kw_only=True):
    # Message of the error that the client received, on one line and shortened. Empty: there was none.
    error_message: str = ""
    stream: bool
    attempts: int
    unaccounted_ms: float
    clocks: list[ClockOffset]
    # URLs of workers that got the request but sent no report: they died, the client left, or they record no timelines.
    # Their stages are missing. Of a failed attempt only the worker at fault counts: the router gave up the others.
    silent_workers: list[str]
    stages: list[TraceStage]


def set_exclusive_times(stages: Sequence[TraceStage], limit: float) -> float:
    """Set the exclusive times of the stages. Return the time that belongs to none. All times are milliseconds.

    Every moment of [0, limit) belongs to the open stage that is first in PRECEDENCE. Among stages of one name, the
    first in `stages` counts.
    """
    order = sorted((stage for stage in stages if _counts(stage)), key=lambda stage: _RANK[stage.name])
    clipped = [(max(0.0, stage.start_ms), min(limit, stage.end_ms), stage) for stage in order]
    bounds = sorted({bound for start, end, _ in clipped if start < end for bound in (start, end)})
    for stage in stages:
        stage.exclusive_ms, stage.before_first_token = 0.0, stage.start_ms < limit
    for left, right in pairwise(bounds):
        owner = next((stage for start, end, stage in clipped if start <= left and right <= end), None)
        if owner is not None:
            owner.exclusive_ms += right - left
    return limit - sum(stage.exclusive_ms for stage in stages)


def _counts(stage: TraceStage) -> bool:
    return stage.name in _RANK and not (stage.where == "prefill" and stage.name in _PREFILL_ANSWER)
