"""Limits in force, for `/server_info`."""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.core.config import LimitsConfig, WorkerConfig

# Context length in tokens that the limit of a body assumes until the length of a model is known.
DEFAULT_CONTEXT_LENGTH = 32_768
_SCHEDULER_LIMITS = (
    *("max_running_requests", "max_queued_requests", "max_queued_grammars", "grammar_timeout"),
    *("grammar_compile_budget", "grammar_step_budget", "grammar_request_budget", "grammar_memory"),
)


def worker_limits(config: WorkerConfig, context_length: int) -> dict[str, Any]:
    """Return the limits of a worker: those of its front end, and those of its scheduler's queues and grammars."""
    scheduler = msgspec.to_builtins(config.scheduler)
    return effective_limits(config.server.limits, context_length) | {n: scheduler[n] for n in _SCHEDULER_LIMITS}


def effective_limits(limits: LimitsConfig, context_length: int) -> dict[str, Any]:
    """Return the value of each limit. The limit of a body is computed for this context length in tokens."""
    return {**msgspec.to_builtins(limits), "max_request_bytes": limits.request_bytes(context_length)}
