"""Limits in force, for `/server_info`."""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.config import LimitsConfig

# Context length in tokens that the limit of a body assumes until the length of a model is known.
DEFAULT_CONTEXT_LENGTH = 32_768


def effective_limits(limits: LimitsConfig, context_length: int) -> dict[str, Any]:
    """Return the value of each limit. The limit of a body is computed for this context length in tokens."""
    return {**msgspec.to_builtins(limits), "max_request_bytes": limits.request_bytes(context_length)}
