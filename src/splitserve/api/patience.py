"""Priority and timeout of a request, given by the client.

`priority`: larger ones go first, if the worker uses priorities. `timeout`: seconds until the answer must be finished,
from the field, or from the header `X-Request-Timeout` if the body cannot be changed. Both apply to every sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import msgspec

from splitserve.api.fanout import FanOut
from splitserve.api.schemas import PatienceFields
from splitserve.core.errors import InvalidRequestError

TIMEOUT_HEADER = "x-request-timeout"
# Largest absolute value.
_LARGEST_PRIORITY = 1 << 31


def with_patience(fanout: FanOut, fields: PatienceFields, headers: Mapping[str, str]) -> FanOut:
    """Return the samples with priority and timeout. Raises InvalidRequestError."""
    priority, timeout = fields.priority or 0, _timeout(fields.timeout, headers.get(TIMEOUT_HEADER))
    if abs(priority) > _LARGEST_PRIORITY:
        raise InvalidRequestError(f"priority is {priority}: it must be in [-2^31, 2^31]", param="priority")
    samples = tuple(
        dataclasses.replace(s, request=msgspec.structs.replace(s.request, priority=priority, timeout=timeout))
        for s in fanout.samples
    )
    return dataclasses.replace(fanout, samples=samples)


def _timeout(field: float | None, header: str | None) -> float | None:
    """Return the timeout in seconds. None: the worker's default."""
    name, value = ("timeout", field) if field is not None or header is None else (TIMEOUT_HEADER, header)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequestError(f"{name} is {value!r}: give a number of seconds above 0", param=name)
    return seconds
