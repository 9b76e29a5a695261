"""The errors of serving, each with its HTTP status and a stable reason code. A class inherits what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import msgspec

# Errors of decoding what another process sent or a file contains. Deeply nested JSON raises RecursionError, and text in
# it that is not UTF-8 UnicodeDecodeError.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
# Length of the longest name to which others are compared.
_MAX_NAME_CHARS = 100

USAGE_EXIT_CODE = 2


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", *, form: str = "{}", likeness: float = 0.6
) -> str:
    """Return a question with the known name nearest to `name`, or `otherwise` if none is near.

    `form`: template of the known name. `likeness`: smallest ratio of difflib that counts as near. Long names are not
    compared, because that is slow.
    """
    near = get_close_matches(name, list(known), 1, likeness) if len(name) <= _MAX_NAME_CHARS else []
    return f"did you mean {form.format(near[0])}?" if near else otherwise


def clause(error: object) -> str:
    """Return the text of `error` in one line, without the punctuation at its end, to be followed by other text."""
    return " ".join(str(error).split()).rstrip(" .;:,")


class SplitserveError(Exception):
    """Base of all errors.

    `message` states what happened, to which request, at which stage and what to do about it.
    """

    http_status = 500
    reason = "internal_error"
    openai_type = "server_error"
    # Exit code of a process that it ends. USAGE_EXIT_CODE: every restart would end the same way.
    exit_code = 1

    def __init_subclass__(
        cls,
        status: int | None = None,
        reason: str | None = None,
        openai_type: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        given = {"http_status": status, "reason": reason, "openai_type": openai_type, "exit_code": exit_code}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(
        self, message: str, *, param: str | None = None, stage: str | None = None, exit_code: int | None = None
    ) -> None:
        """`exit_code`: replaces the exit code of the class. None: the one of the class."""
        super().__init__(message)
        self.message = message
        if exit_code is not None:
            self.exit_code = exit_code
        # The request field at fault, for OpenAI's error shape; None if it is not a single field.
        self.param = param
        # The stage of the request it happened in; None: the one the request is in.
        self.stage = stage
        # JSON of the WorkerTrace of the failed request. None: it was not requested.
        self.trace: bytes | None = None


class InvalidRequestError(SplitserveError, status=400, reason="invalid_request", openai_type="invalid_request_error"):
    """The request itself is at fault."""


class PromptTooLongError(InvalidRequestError, reason="prompt_too_long"):
    """The prompt leaves no room for output."""


class MissingBootstrapError(InvalidRequestError, reason="missing_bootstrap_room"):
    """A PD worker got a request without a bootstrap room."""


class InvalidKeyError(InvalidRequestError, status=401, reason="invalid_api_key"):
    """No API key, or an unknown one."""


class ForbiddenError(InvalidRequestError, status=403, reason="forbidden"):
    """The key is valid, but not for this route."""


class UnknownModelError(InvalidRequestError, status=404, reason="model_not_found"):
    """The worker or router does not serve this model."""


class UnknownWorkerError(InvalidRequestError, status=404, reason="unknown_worker"):
    """No such worker at the router."""


class NotForwardedError(InvalidRequestError, status=404, reason="not_forwarded"):
    """A route of workers that a router does not forward."""


class OnlyAtRouterError(InvalidRequestError, status=404, reason="only_at_router"):
    """A route of routers that a worker does not have."""


class UnknownTraceError(InvalidRequestError, status=404, reason="unknown_trace"):
    """No trace of such a request at the router."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id has not ended."""

    def __init__(self, rid: str) -> None:
        problem = "a request of this id is running: use another rid, or leave it out"
        super().__init__(f"request {rid} (stage: admission): {problem}", param="rid")


class DuplicateRoomError(InvalidRequestError, status=409, reason="duplicate_room"):
    """The same (room, sample) is already being served."""


class RoleSwitchRunningError(InvalidRequestError, status=409, reason="role_switch_running"):
    """The worker changes its role, or drains, already."""


class MemoryBlockedError(InvalidRequestError, status=409, reason="memory_blocked"):
    """Running requests or another change block a change of memory or weights, or released memory one of the role."""


class RateLimitError(SplitserveError, status=429, reason="rate_limit_exceeded", openai_type="requests"):
    """Rejection by a rate limit. `retry_after`: seconds until the next request is accepted."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestAbortedError(SplitserveError, status=499, reason="aborted", openai_type="aborted"):
    """The client disconnected, or an abort was requested."""


class CapacityError(SplitserveError, status=503, reason="over_capacity"):
    """A bounded queue or table is full: retry later."""


class WorkerUnavailableError(SplitserveError, status=503, reason="worker_unavailable"):
    """No worker, or not ready yet."""


class NoWorkerError(WorkerUnavailableError):
    """No worker of a role takes requests now, but one may return: the role had one since the start of the router."""


class WorkerDrainingError(WorkerUnavailableError, reason="worker_draining"):
    """The worker drains, or changes its role, memory or weights, or has another role now. Others serve the request."""


class MemoryReleasedError(WorkerUnavailableError, reason="memory_released"):
    """The worker has released its memory, or some of it."""


class SchedulerLostError(WorkerUnavailableError, reason="scheduler_lost"):
    """The scheduler of a worker died; its worker ends."""


class PoisonRequestError(SplitserveError, reason="poison_request"):
    """Several workers failed while they processed the prompt of this request."""


class DeadlineExceededError(SplitserveError, status=504, reason="deadline_exceeded"):
    """A wait ran out of time; the stage is named."""


class KVTransferError(SplitserveError, reason="kv_transfer_failed"):
    """The transfer of one room's KV cache failed.

    `bootstrap_room` is the room, `failure_reason` the cause as reported by the worker at fault.
    """

    def __init__(self, bootstrap_room: int, failure_reason: str) -> None:
        super().__init__(f"KV transfer of room {bootstrap_room} failed: {failure_reason}")
        self.bootstrap_room = bootstrap_room
        self.failure_reason = failure_reason


class IncompatiblePeerError(KVTransferError, status=503, reason="incompatible_peer"):
    """Versions, layouts or models of the pair differ. The status is 503, because another pair may serve the request."""


class OtherModelError(WorkerUnavailableError, reason="other_model"):
    """A stream that began with another model. Other workers may have it."""


class PeerLostError(KVTransferError, reason="peer_lost"):
    """The peer died or was replaced."""


class EngineError(SplitserveError, reason="engine_error"):
    """The model failed on this step."""


class RanksLostError(SplitserveError, reason="ranks_lost"):
    """The ranks of a worker are out of step: the worker must end."""


class GrammarError(SplitserveError, reason="grammar_refused_token"):
    """The request's grammar does not allow a sampled token."""


class GrammarBudgetError(
    SplitserveError, status=422, reason="grammar_over_budget", openai_type="invalid_request_error"
):
    """The request's grammar needs more time or memory than it is allowed."""


class ClusterError(SplitserveError, reason="cluster_failed"):
    """A failure that stops the cluster started by this process."""


class ModelLoadError(SplitserveError, reason="model_load_failed"):
    """The model could not be loaded."""


class ModelNotFoundError(ModelLoadError, reason="no_such_model", exit_code=USAGE_EXIT_CODE):
    """No such model: a retry cannot succeed."""


class UnsupportedModelError(ModelLoadError, reason="unsupported_model", exit_code=USAGE_EXIT_CODE):
    """The model is not supported, or its files do not fit each other: a retry cannot succeed."""


class ConfigError(SplitserveError, reason="bad_config", exit_code=USAGE_EXIT_CODE):
    """The command line or a config file is wrong."""


class OptionError(ConfigError):
    """An option has a wrong value, or does not go together with others. The message begins with the option's name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option}{'' if problem.startswith(':') else ' '}{problem}")
        # The option at fault, such as `--page-size`.
        self.option = option


class AddressTakenError(ConfigError, exit_code=1):
    """Another process listens at the address: a retry may succeed."""
