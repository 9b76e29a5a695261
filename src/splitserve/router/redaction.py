"""Removal of workers' addresses from messages for clients.

An error of a worker may name its peer. An operator needs that address and finds it in
the router's log. Clients must not learn the addresses inside the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_PLACEHOLDER = "(address: see the router's log)"
_URL = r"\b(?:https?|tcp|ipc)://[^\s,;'\")]*[^\s,;:.'\")]"
_IP_AND_PORT = r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}:\d{1,5}\b|\[[0-9a-fA-F:.]+\]:\d{1,5}\b"


def without_addresses(text: str, hosts: Iterable[str]) -> str:
    """Replace URLs, IP addresses with a port, and `hosts` with a port."""
    names = "|".join(re.escape(host) for host in sorted(set(hosts), key=len, reverse=True) if host)
    pattern = f"{_URL}|{_IP_AND_PORT}" + (rf"|(?<![\w.-])(?:{names}):\d{{1,5}}\b" if names else "")
    return re.sub(pattern, _PLACEHOLDER, text)


def redacted(body: bytes, hosts: Iterable[str]) -> bytes:
    """Return an error's body with a message for clients. A body that is no error of ours stays as it is."""
    try:
        answer = msgspec.json.decode(body)
        error = answer["error"]
        error["message"] = without_addresses(error["message"], hosts)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body
    return msgspec.json.encode(answer)
