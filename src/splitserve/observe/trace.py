"""Trace of one request over all processes: its stages, and the share of each in the time to the first byte.

Stages of different workers overlap: decode waits while prefill computes. `exclusive_seconds` gives every moment to one
stage only, the one that explains it best. So exclusive times add up to the time to the first byte, except for moments
in which no stage was open: these are reported as unaccounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

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
    Stage.FAILED_ATTEMPT,
)
_RANK = {str(stage): rank for rank, stage in enumerate(PRECEDENCE)}
# Stages in which the prefill worker writes its own answer. The client does not wait for it.
_PREFILL_ANSWER = (Stage.TO_FRONT_END, Stage.DETOKENIZE, Stage.RESPONSE_NETWORK)


class PlacedSpan(NamedTuple):
    """Span of one process. Times are seconds since the start of the trace (`TraceSummary.start`)."""

    name: str
    # "router", "prefill", "decode", "null" or "network".
    where: str
    # URL of the worker. Empty: the router.
    worker: str
    start: float
    end: float
    attributes: dict[str, Attribute]


class TraceStage(msgspec.Struct):
    name: str
    where: str
    worker: str
    # Milliseconds since the start of the trace.
    start_ms: float
    end_ms: float
    # Milliseconds of the time to the first byte that belong to this stage alone.
    exclusive_ms: float
    before_first_token: bool
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
    # "running" or "done".
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
    stream: bool
    attempts: int
    unaccounted_ms: float
    clocks: list[ClockOffset]
    # URLs of workers that got the request but sent no report: they died, the client left, or they record no timelines.
    # Their stages are missing. Of a failed attempt only the worker at fault counts: the router gave up the others.
    silent_workers: list[str]
    stages: list[TraceStage]


def exclusive_seconds(spans: Sequence[PlacedSpan], limit: float) -> list[float]:
    """Return for each span the seconds of [0, limit) that belong to it alone. Their sum is at most `limit`.

    Every moment belongs to the open span with the first stage in PRECEDENCE. If several have it, the first span counts.
    """
    clipped = [(max(0.0, span.start), min(limit, span.end)) for span in spans]
    order = sorted((n for n in range(len(spans)) if _counts(spans[n])), key=lambda n: (_RANK[spans[n].name], n))
    owned = [0.0] * len(spans)
    bounds = sorted({bound for n in order if clipped[n][0] < clipped[n][1] for bound in clipped[n]})
    for left, right in pairwise(bounds):
        owner = next((n for n in order if clipped[n][0] <= left and right <= clipped[n][1]), None)
        if owner is not None:
            owned[owner] += right - left
    return owned


def _counts(span: PlacedSpan) -> bool:
    return span.name in _RANK and not (span.where == "prefill" and span.name in _PREFILL_ANSWER)


def stages_of(spans: Sequence[PlacedSpan], first_byte: float | None, end: float) -> tuple[list[TraceStage], float]:
    """Return the stages in order of their start, and the unaccounted milliseconds up to the first byte.

    Both times are seconds since the start of the trace. No `first_byte`: the time up to `end` is divided instead.
    """
    limit = end if first_byte is None else first_byte
    owned = exclusive_seconds(spans, limit)
    stages = [
        TraceStage(
            name=span.name,
            where=span.where,
            worker=span.worker,
            start_ms=span.start * 1e3,
            end_ms=span.end * 1e3,
            exclusive_ms=seconds * 1e3,
            before_first_token=span.start < limit,
            attributes=span.attributes,
        )
        for span, seconds in zip(spans, owned, strict=True)
    ]
    return sorted(stages, key=lambda stage: (stage.start_ms, stage.end_ms)), (limit - sum(owned)) * 1e3
