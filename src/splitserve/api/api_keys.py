"""API keys and the names of their holders.

A file holds one key per line and, after white space, the name of its holder. Empty lines and lines that begin with #
are ignored. A name may have several keys, so that a key can be replaced while both are valid.

This module does not know HTTP.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from splitserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
# Characters that an Authorization header can carry.
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_OTHERS_MAY_READ = 0o044


class ApiKeys:
    """API keys with their holders. `holders`: name by key. Stores only digests of the keys."""

    def __init__(self, holders: Mapping[str, str]) -> None:
        self._salt = secrets.token_bytes(32)
        self._holders = {self._digest(key): name for key, name in holders.items()}

    def holder_of(self, key: str) -> str | None:
        """Return the name of the key's holder. None: the key is unknown.

        The duration of the look-up reveals nothing of the keys: the digests are salted, so no caller can compute the
        digest of a guessed key.
        """
        return self._holders.get(self._digest(key))

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=32).digest()


def read_keys(path: Path, option: str) -> dict[str, str]:
    """Return the names by key, in the file's order. Raises ConfigError.

    A key without a name is named after its line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{option} {path}: {reason}; write one key a line, e.g. from: openssl rand -hex 32") from None
    holders: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if problem := _problem(words, holders):
            raise ConfigError(f"{option} {path}, line {number}: {problem}")
        holders[words[0]] = words[1] if len(words) > 1 else f"line-{number}"
    if not holders:
        raise ConfigError(f"{option} {path}: no key in it; write one a line, e.g. from: openssl rand -hex 32")
    if mode & _OTHERS_MAY_READ:
        _warn_of_others(path)
    return holders


@functools.cache
def _warn_of_others(path: Path) -> None:
    """Warn once, however often the file is read."""
    logger.warning("others on this machine may read the keys: chmod 600 %s", path)


def first_key(path: Path, option: str) -> str:
    """Return the key to authenticate with at other processes. Raises ConfigError."""
    return next(iter(read_keys(path, option)))


def key_header(key: str | None) -> dict[str, str]:
    """Return the header that carries the key. Empty: no key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _problem(words: list[str], known: Mapping[str, str]) -> str | None:
    """Return the problem of a line, or None. The key itself is never part of it."""
    key, *names = words
    if len(key) < MIN_KEY_CHARS or not _KEY.fullmatch(key):
        return f"a key has at least {MIN_KEY_CHARS} characters, letters, digits and ._~+/=- (openssl rand -hex 32)"
    if len(names) > 1 or (names and not _NAME.fullmatch(names[0])):
        return "after the key comes one name of its holder, of letters, digits and ._@-, or nothing"
    return "this key has come before" if key in known else None
