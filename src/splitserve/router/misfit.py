"""What two workers differ in that cannot form a pair, as one of them reported it. Pure."""

from __future__ import annotations

import re

import msgspec

from splitserve.errors import IncompatiblePeerError

# In the worker's message, behind its peer's address, which is for operators alone.
_REASON = re.compile(r"prefill at bootstrap address \S+?(?:, data parallel rank \d+)?: (?P<reason>.+)", re.DOTALL)
_MAX_CHARACTERS = 500


class Misfit(str):
    """The difference, with both values."""

    __slots__ = ()


def misfit_in(body: bytes) -> Misfit | None:
    """The difference that an error reports; None: it is another error."""
    try:
        error = msgspec.json.decode(body)["error"]
        if error["code"] != IncompatiblePeerError.reason:
            return None
        message = str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    found = _REASON.search(message)
    return Misfit(found["reason"][:_MAX_CHARACTERS] if found else "versions, layouts or models differ")
