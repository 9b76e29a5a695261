"""Formats of log lines: text for people, and one JSON object per line for programs.

    2026-01-31 12:00:00,120 INFO [splitserve.router.health] worker url=http://10.0.0.5:30000 healthy=True
    {"time": "2026-01-31T12:00:00.120Z", "level": "info", "logger": "splitserve.router.health",
     "message": "worker url=http://10.0.0.5:30000 healthy=True",
     "values": {"url": "http://10.0.0.5:30000", "healthy": "True"}}

A message without `name=value` words may provide its values as `extra={"values": {...}}`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

# A value is one word, or a string in quotes.
_VALUE = re.compile(r'(?<!\S)([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|\S+)')


class JsonLines(logging.Formatter):
    """Formatter that writes a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        message = record.getMessage()
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if values := getattr(record, "values", None) or values_in(message):
            line["values"] = values
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def text_of(line: str) -> str:
    """Return a line of a log as text for people: a JSON line as a text line, with its exception, others unchanged."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
        head = f"{record['time']} {record['level'].upper()} [{record['logger']}] {record['message']}"
    except (msgspec.MsgspecError, KeyError, AttributeError):
        return line
    return "\n".join(filter(None, (head, record.get("exception"))))


def values_in(message: str) -> dict[str, str]:
    """Return the values of the `name=value` words of a message, without quotes."""
    return {name: _unquoted(value) for name, value in _VALUE.findall(message)}


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return msgspec.json.decode(value.encode(), type=str)
    except msgspec.MsgspecError:
        return value


def _text() -> logging.Formatter:
    return logging.Formatter("%(asctime)s %(levelname)s [%(name)s] %(message)s")


# One per choice of --log-format.
FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {"text": _text, "json": JsonLines}
