"""Temporary folders that are removed with their owner, even if that is killed.

1. The owner makes a folder and holds a lock (flock) on a file in it for as long as it lives.
2. It removes the folder in order, or dies, which releases the lock.
3. `sweep` removes the folders with a free lock. It runs when a command starts. Neither age nor process id counts.

A folder that shall outlive its owner, such as one with logs of a failure, is left by `keep`: it has no lock file then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from splitserve.process.process_end import deferred

# Folders in the temporary directory with this prefix belong to this module alone.
PREFIX = "splitserve-tmp-"
LOCK_NAME = "splitserve-owner.lock"
# Environment variable with the folder of named folders, instead of the usual one.
RUN_FOLDER_VARIABLE = "SPLITSERVE_RUN_DIR"
# A sweep may remove a new folder before its owner holds the lock: then the owner makes another one.
_NUM_ATTEMPTS = 100
# Bytes of the longest temporary directory for sockets. The path of a Unix socket has at most 107: what remains is
# for the owned folder (24) and the name of the socket in it.
_MAX_SOCKET_PARENT = 50
_SHORT_PARENT = Path("/tmp")


class FolderTakenError(Exception):
    """Another process owns the folder of that name."""


class OwnedFolder:
    """A folder that this process owns. Use as a context manager, or `close` it.

    `path`: a folder at a given place, for one owner at a time. None: a new one in `parent`, by default the temporary
    directory. Raises FolderTakenError, OSError.
    """

    def __init__(self, path: Path | None = None, *, parent: Path | None = None) -> None:
        with deferred():
            self.path, self._descriptor = _acquire(path, parent or Path(tempfile.gettempdir()))

    @classmethod
    def for_sockets(cls) -> OwnedFolder:
        """Make a new folder with a path that is short enough for Unix sockets in it, even if TMPDIR is long."""
        parent = Path(tempfile.gettempdir())
        return cls(parent=parent if len(os.fsencode(parent)) <= _MAX_SOCKET_PARENT else _SHORT_PARENT)

    def keep(self) -> None:
        """Leave the folder to the user: neither `close` nor a sweep removes it from now on."""
        (self.path / LOCK_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder, if it was not kept. Idempotent."""
        with deferred():
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor < 0:
                return
            if (self.path / LOCK_NAME).exists():
                _remove(self.path)
            os.close(descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def run_folder() -> Path:
    """Return the folder that contains this user's folders with fixed names, e.g. of running clusters. It may not exist.

    It does not depend on TMPDIR, so that all terminals of a user find the same clusters.
    """
    given = os.environ.get(RUN_FOLDER_VARIABLE)
    return Path(given) if given else _SHORT_PARENT / f"splitserve-{os.getuid()}"


def sweep() -> int:
    """Remove the folders of this user that have a dead owner. Return their number."""
    parents = {Path(tempfile.gettempdir()), _SHORT_PARENT}
    temporary = [path for parent in parents for path in parent.glob(f"{PREFIX}*")]
    try:
        named = list(run_folder().iterdir())
    except OSError:
        # There is none, or it belongs to another user. The command that needs it has an error for that.
        named = []
    # Folders that are empty and have no lock file: the owner died before it created the lock file.
    num_removed = sum(_remove_if_empty(path) for path in temporary)
    num_removed += sum(_remove_if_dead(path) for path in temporary + named)
    remove_run_folder()
    return num_removed


def remove_run_folder() -> None:
    """Remove the folder of `run_folder` if it is empty, unless the user chose it by the environment variable."""
    if RUN_FOLDER_VARIABLE not in os.environ:
        _remove_if_empty(run_folder())


def _acquire(path: Path | None, parent: Path) -> tuple[Path, int]:
    """Make the folder and lock it. Return it and the descriptor that holds the lock."""
    for _ in range(_NUM_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)) if path is None else path
        if path is not None:
            with suppress(FileExistsError):
                os.mkdir(path, mode=0o700)
        try:
            descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            # A sweep has removed the folder.
            continue
        if _is_lock_free(descriptor):
            if os.fstat(descriptor).st_nlink:
                return folder, descriptor
        elif path is not None:
            os.close(descriptor)
            raise FolderTakenError(str(path))
        os.close(descriptor)
    raise OSError(f"cannot make a folder in {parent if path is None else path.parent}")


def _is_lock_free(descriptor: int) -> bool:
    """Take the lock. Return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system has no locks. Then no sweep can take it either, and the folder is never removed by one.
        return True
    return True


def _remove_if_dead(path: Path) -> bool:
    """Remove a folder with a lock that no process holds. Return whether that was so."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_if_empty(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a folder, its lock last: the next sweep finishes a removal that was cut off."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != LOCK_NAME:
            with suppress(OSError):
                os.unlink(entry.path)
    with suppress(OSError):
        os.unlink(path / LOCK_NAME)
        path.rmdir()
