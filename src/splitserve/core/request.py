"""One sample of a client request in the scheduler, from arrival to its one final message.

Scheduling advances one quantity, `num_computed_tokens`, towards `num_tokens` (prompt + output). If they are equal after
a step, a token is sampled and `num_tokens` grows by one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from splitserve.core.batch import DraftState, HiddenState, TokenLogprob
from splitserve.core.errors import GrammarError, SplitserveError
from splitserve.core.grammar import GrammarMatcher
from splitserve.core.sampling import ResolvedSampling, mix64
from splitserve.core.timeline import Timeline


class DisaggregationMode(enum.StrEnum):
    """The role of a worker."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def adjective(self) -> str:
        """Return the kind of worker, for texts: colocated, prefill or decode."""
        return "colocated" if self is DisaggregationMode.NULL else str(self)


@dataclass(frozen=True, slots=True, order=True)
class RoomKey:
    """Key of a KV transfer for both workers. Samples of one request may share a room number, never a key."""

    room: int
    sample: int = 0

    @property
    def tag(self) -> int:
        """64-bit tag for tables in memory that both workers read; never 0."""
        return mix64(self.room, self.sample) | 1

    def successor(self) -> RoomKey:
        """Return an unused key for the next transfer of the same sample."""
        return RoomKey(mix64(self.room, self.sample) >> 1, self.sample)

    def __str__(self) -> str:
        return f"{self.room}/{self.sample}"


# Requests with this bootstrap host have no peer: warm-up, health generation, and all requests of a fake backend.
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
# Priority of probes of a router. Clients may send at most 2^31.
PROBE_PRIORITY = 1 << 32
# Priority on a prefill worker of prompts that decode workers request: their requests ran already and were retracted.
RETRACTED_PRIORITY = PROBE_PRIORITY - 1
# Transfer backend without peers: a prefill worker sends into a sink, a decode worker gets synthetic KV.
FAKE_BACKEND = "fake"


@dataclass(frozen=True, slots=True)
class BootstrapInfo:
    """Location of the request's prefill worker. Chosen by the router, the same for both workers."""

    # The prefill worker's bootstrap server. FAKE_BOOTSTRAP_HOST: the request has no peer.
    host: str
    port: int
    key: RoomKey
    # Data parallel rank of the prefill worker; None: derived from the room's number.
    dp_rank: int | None = None

    @property
    def is_fake(self) -> bool:
        """Return whether the request has no peer."""
        return self.host == FAKE_BOOTSTRAP_HOST

    def prefill_rank(self, dp_size: int) -> int:
        """Return the data parallel rank of prefill that serves the room. Both workers apply this rule."""
        return self.key.room % dp_size if self.dp_rank is None else self.dp_rank


class FinishType(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended."""

    type: FinishType
    # The stop token id or stop string that matched, for STOP.
    matched: int | str | None = None
    # For ABORT: what happened, the HTTP status to return and the reason code.
    message: str | None = None
    status_code: int | None = None
    reason: str | None = None
    # For ABORT: the request field at fault, if there is one.
    param: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A sample being served. The scheduler owns it; the mutable fields change only in the scheduler's thread."""

    rid: str
    prompt_ids: list[int]
    params: ResolvedSampling
    eos_token_ids: frozenset[int] = frozenset()
    bootstrap: BootstrapInfo | None = None
    # Whether its prompt's KV comes from no model. The prefix cache never keeps such KV.
    is_synthetic: bool = False
    return_logprob: bool = False
    num_top_logprobs: int = 0
    # Whether to return the hidden state that each token is sampled from.
    return_hidden_states: bool = False
    # First prompt position to return a logprob for; None: no input logprobs.
    logprob_start: int | None = None
    # Position of the output in `params.grammar`, once that is compiled.
    grammar: GrammarMatcher | None = None
    # Number of the request in order of arrival at this worker.
    number: int = 0
    # Number by which the front end distinguishes requests with equal rids.
    submission: int = 0
    # Larger goes first.
    priority: int = 0
    # Clock time at which it must have ended, and the seconds from its arrival until then; None: no limit.
    deadline: float | None = None
    timeout: float | None = None

    # The first `num_given_tokens` came with the request: another worker generated them.
    output_ids: list[int] = field(default_factory=list)
    num_given_tokens: int = 0
    # Logprobs of the tokens that this worker generated.
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    # Hidden states of the tokens that were not sent to the front end yet.
    hidden_states: list[HiddenState] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    # State of the draft head behind the last token. None: no step has returned one.
    draft_state: DraftState | None = None
    num_computed_tokens: int = 0
    # How often the request was retracted.
    num_retractions: int = 0
    # Pages of tokens [0, len(pages) x page_size). The first ones, those found in the prefix cache, belong to the cache
    # and are held by its lock; the rest belong to this request.
    pages: list[int] = field(default_factory=list)
    # Steps of this request that verified proposals, the proposals in them, and how many of these were accepted.
    num_verify_steps: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    # Tokens found in a prefix cache on the worker that computed the prompt.
    num_cached_tokens: int = 0
    # Row of the page table; None while the request is not admitted.
    row: int | None = None
    finish: FinishReason | None = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that came with the request. Their KV is computed before this worker samples its first token."""
        return len(self.prompt_ids) + self.num_given_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens_at_most(self) -> int:
        """Maximum number of tokens of this request."""
        return len(self.prompt_ids) + self.params.max_new_tokens

    @property
    def is_probe(self) -> bool:
        return self.priority == PROBE_PRIORITY

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key, smallest first: by higher priority, then by age."""
        return (-self.priority, self.number)

    @property
    def next_input_logprob(self) -> int | None:
        """First prompt position that is not scored yet. None: all are scored."""
        if self.logprob_start is None:
            return None
        # The first prompt token cannot be scored, because no token precedes it.
        position = max(self.logprob_start, 1) + len(self.input_logprobs)
        return position if position < self.num_prompt_tokens else None

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens at positions [start, end) of prompt and output."""
        n = len(self.prompt_ids)
        if end <= n:
            return self.prompt_ids[start:end]
        if start >= n:
            return self.output_ids[start - n : end - n]
        return self.prompt_ids[start:] + self.output_ids[: end - n]

    def append(self, token_id: int, logprob: TokenLogprob | None, hidden_state: HiddenState | None = None) -> None:
        """Append the next token and finish the request if it ends there. A token that the grammar rejects fails it.

        `logprob`, `hidden_state`: None unless requested.
        """
        if self.grammar is not None and not self.grammar.accept(token_id):
            refusal = GrammarError(
                f"its grammar does not allow token {token_id} at output position {len(self.output_ids)}; where another "
                "worker sampled it, check that both run the same version and got the same request"
            )
            self.finish = self.failed_with(self.grammar.failure or refusal)
            return
        self.output_ids.append(token_id)
        if logprob is not None:
            self.output_logprobs.append(logprob)
        if hidden_state is not None:
            self.hidden_states.append(hidden_state)
        self.finish = self._finish_after(token_id)

    def _finish_after(self, token_id: int) -> FinishReason | None:
        p = self.params
        if self.grammar is not None and self.grammar.is_terminated():
            return FinishReason(FinishType.STOP, matched=token_id if token_id in self.eos_token_ids else None)
        if len(self.output_ids) >= p.min_new_tokens:
            is_eos = token_id in self.eos_token_ids and not p.ignore_eos
            if is_eos or token_id in p.stop_token_ids:
                return FinishReason(FinishType.STOP, matched=token_id)
        if len(self.output_ids) >= p.max_new_tokens:
            return FinishReason(FinishType.LENGTH)
        return None

    def failed_with(self, error: SplitserveError) -> FinishReason:
        """Return the end of the request with `error`; its stage and id are part of the message."""
        message = f"request {self.rid} ended in stage '{error.stage or self.timeline.stage}': {error.message}"
        return FinishReason(
            FinishType.ABORT, message=message, status_code=error.http_status, reason=error.reason, param=error.param
        )
