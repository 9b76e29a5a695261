"""Difference between two workers that cannot form a pair, read from the error of one of them. Pure."""

from __future__ import annotations

import re

import msgspec

from splitserve.core.errors import IncompatiblePeerError

# The worker's message begins with the address of its peer, which is for operators only.
_REASON = re.compile(r"prefill at bootstrap address \S+?(?:, data parallel rank \d+)?: (?P<reason>.+)", re.DOTALL)
_MAX_CHARACTERS = 500


class Misfit(str):
    """Difference between two workers, with both values."""

    __slots__ = ()


def misfit_in(body: bytes) -> Misfit | None:
    """Return the difference that an error reports. None: the error is another one."""
    try:
        error = msgspec.json.decode(body)["error"]
        if error["code"] != IncompatiblePeerError.reason:
            return None
        message = str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    found = _REASON.search(message)
    return Misfit(found["reason"][:_MAX_CHARACTERS] if found else "versions, layouts or models differ")
