"""Messages between a worker's front end and its scheduler. Tagged msgspec structs, msgpack on the wire."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from splitserve.core.batch import HiddenState, TokenLogprob
from splitserve.core.memory import MemoryStep, MemoryTag, WeightsSource
from splitserve.core.request import BootstrapInfo, DisaggregationMode, FinishReason
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.steps import StepPage
from splitserve.core.timeline import StageReport


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base: the class name is the tag."""


class SchedulerCall(Message, frozen=True):
    """Base of calls and of their replies, which have the same number."""

    call_id: int


class GenerateRequest(Message, frozen=True):
    """Serve one sample. `rid` is unique in this worker (the front end makes it so for n > 1 and batches)."""

    rid: str
    prompt_ids: list[int]
    params: ResolvedSampling
    bootstrap: BootstrapInfo | None = None
    return_logprob: bool = False
    num_top_logprobs: int = 0
    return_hidden_states: bool = False
    # First prompt position to return a logprob for; None: no input logprobs.
    logprob_start: int | None = None
    # Output that another worker has generated already: the request continues after it, and none of it is sent again.
    output_ids: list[int] = []
    # Larger goes first, if the worker has priorities enabled.
    priority: int = 0
    # Seconds from its arrival at the scheduler until it must have ended; None: the worker's default.
    timeout: float | None = None
    # Clock time at which it was sent, of the clock that all processes of a host share.
    sent_at: float = 0.0
    # Number of this use of the rid. Every output repeats it: an aborted request may have had the same rid.
    submission: int = 0


class AbortRequest(Message, frozen=True):
    """End a request now. The scheduler sends its one final TokenOutput, unless it has ended already.

    `quiet`: the front end has matched a stop string or lost the client, and waits for no reply; none is sent.
    """

    rid: str
    message: str = "aborted"
    quiet: bool = False


class FlushCacheRequest(SchedulerCall, frozen=True):
    """Drop every prefix-cache entry that no request uses."""


class StateRequest(SchedulerCall, frozen=True):
    """Request a snapshot of the scheduler's state."""


class KVIndexRequest(SchedulerCall, frozen=True):
    """Request all blocks in the caches."""


class StepsRequest(SchedulerCall, frozen=True):
    """Request records of steps: the first ones after the number `since`, or the last ones if it is None."""

    since: int | None = None
    limit: int = 1000


class RoleStep(enum.StrEnum):
    """Steps of a scheduler towards another role; `scheduler/role_switch.py`."""

    PREPARE = "prepare"
    DRAIN = "drain"
    # DRAIN without a prepared role, for a MemoryRequest.
    HOLD = "hold"
    COMMIT = "commit"
    CANCEL = "cancel"


class RoleRequest(SchedulerCall, frozen=True):
    """One step of a switch to another role. The reply is sent when it is done, or cannot be done."""

    step: RoleStep
    # PREPARE: the role.
    mode: DisaggregationMode = DisaggregationMode.NULL
    # PREPARE, prefill: URL at which the worker's bootstrap server takes registrations.
    bootstrap_url: str | None = None
    # DRAIN, HOLD: seconds until all requests and pages must be released.
    timeout: float = 0.0


class MemoryRequest(SchedulerCall, frozen=True):
    """One step of a release of memory, or of an update of weights. The reply is a RoleReply."""

    step: MemoryStep
    # RELEASE, RESUME.
    tags: frozenset[MemoryTag] = frozenset()
    # LOAD.
    source: WeightsSource | None = None
    # RESUME, UPDATE, prefill: URL at which the worker's bootstrap server takes registrations.
    bootstrap_url: str | None = None


class TransferPart(msgspec.Struct, array_like=True, frozen=True):
    """Writes of one part of a KV transfer: the pages of one chunk, or the last pages and the metadata row."""

    # Clock times of the prefill worker, seconds, at which the writes were queued and the last one was confirmed.
    start: float
    end: float
    num_bytes: int
    num_writes: int


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """One request's KV transfer, as measured by the prefill worker."""

    # Bytes written into the decode worker's memory, pages and metadata.
    num_bytes: int
    # Writes that carried them.
    num_writes: int = 0
    # Pages that changed owner instead: both workers compute in one pool.
    num_pages_exchanged: int = 0
    # From the first write's submission to the last write's proof of completion, seconds.
    seconds: float
    # Seconds of the transfer after the prompt's last forward pass: time not hidden by compute.
    exposed_seconds: float
    # Address of the decode worker. Empty: there was none.
    peer: str = ""
    # The parts in order. In a long transfer the last part covers all later chunks.
    parts: tuple[TransferPart, ...] = ()


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation figures of one request."""

    # Steps of the request that verified proposals, number of these proposals, and number of accepted ones.
    num_verify_steps: int
    num_proposed_tokens: int
    num_accepted_tokens: int


class TokenOutput(Message, frozen=True):
    """New tokens of one request. The one with `finish` set is its last message."""

    rid: str
    # `submission` of its GenerateRequest.
    submission: int = 0
    # Tokens since the last message, with their logprobs if requested.
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    # Hidden state that each of these tokens was sampled from, if requested.
    hidden_states: list[HiddenState] = []
    # Logprobs of prompt tokens, complete in the first message that has any. None unless requested; the first prompt
    # token has none.
    input_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    # With `finish`, and with the first output after a new span: a stop string may end the request without `finish`.
    stages: StageReport | None = None
    # Only with `finish`, from a prefill worker.
    transfer: TransferStats | None = None
    # If there were proposals.
    speculation: SpeculationStats | None = None


class StepOutputs(Message, frozen=True):
    """All outputs of one step in one frame."""

    outputs: list[TokenOutput]
    # Clock time at which they were sent, of the clock that all processes of a host share.
    sent_at: float = 0.0


class FlushCacheReply(SchedulerCall, frozen=True):
    num_pages_freed: int


# Upper bounds of the buckets for step times, seconds.
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class StepTimeHistogram(msgspec.Struct, array_like=True, frozen=True):
    """Times of all steps of one kind since startup."""

    # Number of steps per bucket of STEP_SECONDS. The last number counts steps longer than all bounds.
    counts: tuple[int, ...]
    # Sum of their times, seconds.
    total: float


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of queues, pages and counters. If a worker is idle, all pages are free or cached."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    # Value of WaitReason: what requests wait for. Empty: no request waits for memory, a place or a step's budget.
    waiting_reason: str = ""
    # Waiting requests with a grammar that is still being compiled.
    num_grammar_queue_reqs: int = 0
    # Retracted requests that wait to resume, and the bytes of host memory that hold their KV.
    num_retracted_reqs: int = 0
    retraction_host_bytes: int = 0
    # Bytes of host memory that hold evicted prefixes.
    prefix_host_bytes: int = 0
    # Disaggregation queues; zero in the other roles.
    num_prefill_bootstrap_queue_reqs: int = 0
    num_prefill_inflight_queue_reqs: int = 0
    num_decode_prealloc_queue_reqs: int = 0
    num_decode_transfer_queue_reqs: int = 0
    # Prompt tokens of requests with a KV transfer in progress.
    num_tokens_pre_allocated: int = 0
    # Queue -> seconds since its oldest request entered its current stage. 0: the queue is empty.
    queue_ages: dict[str, float] = {}
    page_size: int
    pages_total: int
    pages_free: int
    pages_cached: int
    # Pages of requests that have ended while a peer may still access them.
    pages_leased: int = 0
    # Pages of the pool of windowed layers, and of these those in no request's window. 0: no such pool.
    window_pages_total: int = 0
    window_pages_free: int = 0
    rows_total: int
    rows_free: int
    metadata_slots_total: int = 0
    metadata_slots_free: int = 0
    # Totals since startup.
    num_transfer_failed_reqs_total: int = 0
    # Decode: requests for which this worker computed the prompt itself.
    num_local_prefill_reqs_total: int = 0
    num_retracted_requests_total: int = 0
    # Retracted requests that got back all their KV, and tokens that were computed again for the others.
    num_retracted_resumed_whole_total: int = 0
    num_retracted_recomputed_tokens_total: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of these, found
    prefix_cache_host_hits: int = 0  # of these, in host memory
    num_steps_total: int = 0
    # Time of the measured steps.
    step_seconds_total: float = 0.0
    num_computed_tokens_total: int = 0
    num_finished_reqs_total: int = 0
    # Output tokens per second in the last second in which tokens were generated.
    last_gen_throughput: float = 0.0
    # Speculation: steps of requests that verified proposals, the proposals in them, and those that were accepted.
    spec_decode_num_drafts_total: int = 0
    spec_decode_num_draft_tokens_total: int = 0
    spec_decode_num_accepted_tokens_total: int = 0
    # Conservation checks that failed: any value but 0 is a bug.
    num_invariant_violations_total: int = 0
    # Prompt and output tokens of all requests in the worker, for load balancing.
    num_tokens_held: int = 0
    # Adaptive chunks: limit of prompt tokens in the last plan, target time of a step, and predicted and measured time
    # of the last step with decodes and prompts. Times are in seconds. 0: not measured, or chunks have a fixed size.
    prefill_chunk_tokens: int = 0
    target_step_seconds: float = 0.0
    mixed_step_predicted_seconds: float = 0.0
    mixed_step_seconds: float = 0.0
    # Kind of step ("decode", "prefill", "mixed") -> times.
    step_times: dict[str, StepTimeHistogram] = {}

    @property
    def kv_usage(self) -> float:
        """Return the share of the pool held by requests, in [0, 1]: pages that are neither free nor only cached."""
        held = (self.pages_total - self.pages_free - self.pages_cached) / max(self.pages_total, 1)
        return max(held, (self.window_pages_total - self.window_pages_free) / max(self.window_pages_total, 1))


class StateReply(SchedulerCall, frozen=True):
    state: SchedulerState


class KVIndexReply(SchedulerCall, frozen=True):
    # JSON of an events.schema.IndexSnapshot: the front end only passes it on.
    snapshot: bytes


class StepsReply(SchedulerCall, frozen=True):
    page: StepPage


class RoleReply(SchedulerCall, frozen=True):
    """Answer to a RoleRequest or a MemoryRequest."""

    # Why the step failed; empty: it succeeded.
    error: str = ""
    # HTTP status of the error.
    status_code: int = 200
    # After a change of memory: fingerprint of the model in use.
    model: str = ""


class SchedulerReady(Message, frozen=True):
    """Message that the model is loaded, the pool is allocated, and the scheduler takes requests."""

    # Maximum number of prompt and output tokens of a request: the model's context, or the pool if that is smaller.
    max_total_tokens_per_request: int
    vocab_size: int
    pages_total: int
    page_size: int
    dtype: str
    kv_bytes_per_token: int
    device: str
    num_parameters: int
    load_seconds: float
    # Build of the kernels in C that computes the model. None: torch computes it.
    kernels: str | None = None
    # How the checkpoint's weights are quantized. Empty: they are not.
    quantization: str = ""
    # How the weights in memory are: --quantization, or the method of the checkpoint. None: they are floats.
    weights_quantization: str | None = None
    # Whether the bits of a token's logits depend on its own sequence only.
    batch_invariant: bool = False
    # CPU threads of the model.
    threads: int = 0
    # Fingerprint of the model in use.
    model: str = ""
    # Endpoints that publish and replay KV events, as bound; one per rank. Empty strings: none.
    kv_events_endpoints: list[str] = []
    kv_replay_endpoints: list[str] = []


class SchedulerFailed(Message, frozen=True):
    """Message that the scheduler could not start, or that a rank of its model failed. Its process ends after this."""

    message: str
    # Of the whole worker, if it has not served yet.
    exit_code: int = 1


ToScheduler = (
    GenerateRequest
    | AbortRequest
    | FlushCacheRequest
    | StateRequest
    | KVIndexRequest
    | StepsRequest
    | RoleRequest
    | MemoryRequest
)
FromScheduler = (
    StepOutputs
    | FlushCacheReply
    | StateReply
    | KVIndexReply
    | StepsReply
    | RoleReply
    | SchedulerReady
    | SchedulerFailed
)

encode: Callable[[ToScheduler | FromScheduler], bytes] = msgspec.msgpack.Encoder().encode
# Both raise msgspec.DecodeError on anything that is not exactly one of the messages.
decode_to_scheduler: Callable[[bytes], ToScheduler] = msgspec.msgpack.Decoder(ToScheduler).decode
decode_from_scheduler: Callable[[bytes], FromScheduler] = msgspec.msgpack.Decoder(FromScheduler).decode
