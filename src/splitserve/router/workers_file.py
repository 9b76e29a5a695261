"""File that lists workers as JSON lines, read again when it changes.

    {"url": "http://10.0.0.5:30000", "mode": "prefill", "bootstrap_port": 8998}
    {"url": "http://10.0.0.6:30000", "mode": "decode"}

Empty lines and lines that begin with # are ignored. Effect on a worker:
1. Its line is added: it is added as a static worker. If the mode changes, it is another worker. A changed bootstrap
   port applies from then on.
2. Its line is removed: it drains, as after POST /deregister. It gets no new requests, and is forgotten when its running
   requests have ended. If its line returns before that, it is used again.

A file is read once it has not changed between two checks, so that a half-written file is not read. A file that cannot
be read, or has an invalid line, is logged once; until it changes again the previous workers stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from pydantic import ValidationError

from splitserve.core.errors import ConfigError, OptionError
from splitserve.router.register import PDRegistryRequest
from splitserve.router.registry import WorkerRegistry

logger = logging.getLogger(__name__)

_EXAMPLE = '{"url": "http://10.0.0.6:30000", "mode": "decode"}'
# Identity of a file's version. None: there is no file.
_Signature = tuple[int, int, int] | None


def read_workers(path: Path) -> dict[str, PDRegistryRequest]:
    """Return the workers by URL, in the file's order. Raises ConfigError, which names the line and the remedy."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError("--workers-file", f"{path}: {reason}; write one worker a line, such as {_EXAMPLE}") from None
    workers: dict[str, PDRegistryRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            worker = _parse(line)
            if worker.registry_url in workers:
                raise ValueError("this worker's url has come before: leave one of the lines out")
        except ValueError as error:
            raise OptionError("--workers-file", f"{path}, line {number}: {error}") from None
        workers[worker.registry_url] = worker
    return workers


def _parse(line: str) -> PDRegistryRequest:
    """Parse one line. Raises ValueError."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error}): write one object a line, such as {_EXAMPLE}") from None
    if not isinstance(fields, dict) or "url" not in fields:
        raise ValueError(f"it is no object with a url: write one a line, such as {_EXAMPLE}")
    try:
        return PDRegistryRequest.model_validate({**fields, "registry_url": fields["url"]})
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg'].removeprefix('Value error, ')}" for e in error.errors())
        raise ValueError(f"{'; '.join(p.strip() for p in problems)}, such as {_EXAMPLE}") from None


class WorkersFile:
    """Synchronizer of the registry with the file.

    Reads the file on construction. Raises ConfigError if it is invalid.
    """

    def __init__(self, path: Path, registry: WorkerRegistry, interval: float) -> None:
        self._path = path
        self._registry = registry
        self._interval = interval
        # Versions of the file: the one that was read last, and the one at the last check.
        self._read = self._seen = _signature(path)
        self._listed: dict[str, PDRegistryRequest] = {}
        self.take(read_workers(path))

    async def run(self) -> None:
        """Check the file periodically until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            # The file may be on a slow network file system.
            listed = await asyncio.to_thread(self.changed)
            if listed is not None:
                self.take(listed)

    def changed(self) -> dict[str, PDRegistryRequest] | None:
        """Return the file's workers if it has changed and is valid. None: no valid change."""
        before, self._seen = self._seen, _signature(self._path)
        if self._seen == self._read or self._seen != before:
            return None
        self._read = self._seen
        try:
            return read_workers(self._path)
        except ConfigError as error:
            logger.error("%s. The %d workers of before stay", error.message, len(self._listed))
            return None

    def take(self, listed: dict[str, PDRegistryRequest]) -> None:
        """Apply the changes since the last list to the registry."""
        for url in self._listed.keys() - listed.keys():
            if self._registry.deregister(url):
                logger.info("worker no longer listed url=%s", url)
        for url, worker in listed.items():
            if self._listed.get(url) == worker:
                continue
            if self._registry.add(url, worker.role, worker.bootstrap_port, is_static=True):
                logger.info("worker listed url=%s mode=%s", url, worker.mode)
        self._listed = listed


def _signature(path: Path) -> _Signature:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
