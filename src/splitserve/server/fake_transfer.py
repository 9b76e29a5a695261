"""Requests without a peer on a prefill or decode worker: when they are accepted, and what the answers carry.

With `--transfer-backend fake` these are all requests. With another backend they are those with bootstrap host
FAKE_BOOTSTRAP_HOST. A decode worker answers them from synthetic KV, so no client may get such an answer by accident:
the request needs a header, and the answer is marked.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from splitserve.api.schemas import GenerationFields
from splitserve.core.errors import InvalidRequestError
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import FAKE_BACKEND, FAKE_BOOTSTRAP_HOST, BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.server.front_end import FrontEnd

# Header of a request that accepts an answer from a fake transfer, and of that answer.
FAKE_HEADER = "x-splitserve-fake-transfer"
FAKE_ACCEPTED = "yes"


class FakeTransferError(InvalidRequestError, reason="fake_transfer"):
    """A request would get a fake KV transfer, but does not accept one by its header, or has a grammar."""


def check_fake_transfer(
    front: FrontEnd, fields: GenerationFields, headers: Mapping[str, str], specs: Sequence[GenerateRequest]
) -> None:
    """Raise FakeTransferError for a request with a fake transfer that lacks the header, or has a grammar."""
    if not _is_fake(front, fields):
        return
    if headers.get(FAKE_HEADER) != FAKE_ACCEPTED:
        has_peers = not _has_no_peers(front)
        cause = f"bootstrap_host is {FAKE_BOOTSTRAP_HOST}" if has_peers else "it runs with --transfer-backend fake"
        raise FakeTransferError(
            f"this {front.mode} worker would serve the request without a peer, because {cause}. The answer would mean "
            f"nothing. Send it to another worker, or accept that with the header {FAKE_HEADER}: {FAKE_ACCEPTED}",
            param=FAKE_HEADER,
        )
    if front.mode is DisaggregationMode.DECODE and any(spec.params.grammar is not None for spec in specs):
        raise FakeTransferError(
            "a structured output cannot follow a fake transfer, because its first token comes from no model: leave "
            "the grammar out"
        )


def fake_bootstraps(front: FrontEnd, fields: GenerationFields, num_samples: int) -> list[BootstrapInfo | None] | None:
    """Return the bootstraps of a worker without peers, one per sample. None: the worker has peers."""
    if not _has_no_peers(front):
        return None
    if front.mode is DisaggregationMode.DECODE and fields.bootstrap_room is None and fields.local_prefill:
        return [None] * num_samples
    return [BootstrapInfo(FAKE_BOOTSTRAP_HOST, 0, RoomKey(secrets.randbits(63))) for _ in range(num_samples)]


def _has_no_peers(front: FrontEnd) -> bool:
    config = front.config.disaggregation
    return config.transfer_backend == FAKE_BACKEND and config.mode is not DisaggregationMode.NULL


def _is_fake(front: FrontEnd, fields: GenerationFields) -> bool:
    if front.mode is DisaggregationMode.NULL:
        return False
    return _has_no_peers(front) or FAKE_BOOTSTRAP_HOST in _hosts(fields)


def _hosts(fields: GenerationFields) -> list[object]:
    hosts = fields.bootstrap_host
    return hosts if isinstance(hosts, list) else [hosts]
