"""The errors of serving, each with its HTTP status and a stable reason code.

SplitserveError
├── InvalidRequestError          400  the request itself is at fault
│   ├── PromptTooLongError       400
│   └── MissingBootstrapError    400  a PD worker got a request without a bootstrap room
├── InvalidKeyError              401  no API key, or an unknown one
├── ForbiddenError               403  the key is valid, but not for this route
├── UnknownModelError            404
├── UnknownWorkerError           404  no such worker at the router
├── DuplicateRoomError           409  the same (room, sample) is already being served
├── RoleSwitchRunningError       409  the worker changes its role, or drains, already
├── RateLimitError               429  the caller exceeded its rate
├── RequestAbortedError          499  the client disconnected, or an abort was requested
├── CapacityError                503  a bounded queue or table is full: retry later
├── WorkerUnavailableError       503  no worker, or not ready yet
│   └── SchedulerLostError       503  the scheduler of a worker died; its worker ends
├── PoisonRequestError           500  several workers failed while they processed the prompt of this request
├── GrammarBudgetError           422  the request's grammar needs more time or memory than it is allowed
├── DeadlineExceededError        504  a wait ran out of time; the stage is named
├── KVTransferError              500  the KV cache of one room could not be transferred
│   ├── IncompatiblePeerError    503  versions, layouts or models of the pair differ
│   └── PeerLostError            500  the peer died or was replaced
├── EngineError                  500  the model failed on this step
├── RanksLostError               500  the ranks of a worker are out of step: the worker must end
├── GrammarError                 500  the request's grammar does not allow a sampled token
├── ClusterError                 500  a process of a cluster died, or was not ready in time
├── ModelLoadError               500
│   └── ModelNotFoundError       500  no such model: a retry cannot succeed
└── ConfigError                  500  the command line or a config file is wrong
    ├── OptionError              500  one option is wrong; names it
    └── AddressTakenError        500  another process listens at the address: a retry may succeed
"""

from __future__ import annotations

USAGE_EXIT_CODE = 2


def clause(error: object) -> str:
    """Return the text of `error` without the punctuation at its end, to be followed by other text."""
    return str(error).rstrip(" .;:,\n")


class SplitserveError(Exception):
    """Base of all errors.

    `message` states what happened, to which request, at which stage and what to do about it.
    """

    http_status = 500
    reason = "internal_error"
    openai_type = "server_error"
    # Exit code of a process that it ends. USAGE_EXIT_CODE: every restart would end the same way.
    exit_code = 1

    def __init__(self, message: str, *, param: str | None = None, stage: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        # The request field at fault, for OpenAI's error shape; None if it is not a single field.
        self.param = param
        # The stage of the request it happened in; None: the one the request is in.
        self.stage = stage


class InvalidRequestError(SplitserveError):
    http_status = 400
    reason = "invalid_request"
    openai_type = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    reason = "prompt_too_long"


class MissingBootstrapError(InvalidRequestError):
    reason = "missing_bootstrap_room"


class InvalidKeyError(InvalidRequestError):
    http_status = 401
    reason = "invalid_api_key"


class ForbiddenError(InvalidRequestError):
    http_status = 403
    reason = "forbidden"


class UnknownModelError(InvalidRequestError):
    http_status = 404
    reason = "model_not_found"


class UnknownWorkerError(InvalidRequestError):
    http_status = 404
    reason = "unknown_worker"


class DuplicateRoomError(InvalidRequestError):
    http_status = 409
    reason = "duplicate_room"


class RoleSwitchRunningError(InvalidRequestError):
    http_status = 409
    reason = "role_switch_running"


class RateLimitError(SplitserveError):
    """Rejection by a rate limit. `retry_after`: seconds until the next request is accepted."""

    http_status = 429
    reason = "rate_limit_exceeded"
    openai_type = "requests"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestAbortedError(SplitserveError):
    http_status = 499
    reason = "aborted"
    openai_type = "aborted"


class CapacityError(SplitserveError):
    http_status = 503
    reason = "over_capacity"


class WorkerUnavailableError(SplitserveError):
    http_status = 503
    reason = "worker_unavailable"


class SchedulerLostError(WorkerUnavailableError):
    reason = "scheduler_lost"


class PoisonRequestError(SplitserveError):
    reason = "poison_request"


class DeadlineExceededError(SplitserveError):
    http_status = 504
    reason = "deadline_exceeded"


class KVTransferError(SplitserveError):
    """The transfer of one room's KV cache failed.

    `bootstrap_room` is the room, `failure_reason` the cause as reported by the worker at fault.
    """

    reason = "kv_transfer_failed"

    def __init__(self, bootstrap_room: int, failure_reason: str) -> None:
        super().__init__(f"KV transfer of room {bootstrap_room} failed: {failure_reason}")
        self.bootstrap_room = bootstrap_room
        self.failure_reason = failure_reason


class IncompatiblePeerError(KVTransferError):
    # The status of an unavailable worker: another pair may serve the request.
    http_status = 503
    reason = "incompatible_peer"


class PeerLostError(KVTransferError):
    reason = "peer_lost"


class EngineError(SplitserveError):
    reason = "engine_error"


class RanksLostError(SplitserveError):
    reason = "ranks_lost"


class GrammarError(SplitserveError):
    reason = "grammar_refused_token"


class GrammarBudgetError(SplitserveError):
    http_status = 422
    reason = "grammar_over_budget"
    openai_type = "invalid_request_error"


class ClusterError(SplitserveError):
    """A failure that stops the cluster started by this process."""

    reason = "cluster_failed"


class ModelLoadError(SplitserveError):
    reason = "model_load_failed"


class ModelNotFoundError(ModelLoadError):
    reason = "no_such_model"
    exit_code = USAGE_EXIT_CODE


class ConfigError(SplitserveError):
    reason = "bad_config"
    exit_code = USAGE_EXIT_CODE


class OptionError(ConfigError):
    """An option has a wrong value, or does not go together with others. The message begins with the option's name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option}{'' if problem.startswith(':') else ' '}{problem}")
        # The option at fault, such as `--page-size`.
        self.option = option


class AddressTakenError(ConfigError):
    exit_code = 1
