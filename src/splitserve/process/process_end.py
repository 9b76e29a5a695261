"""The end of a process: by a signal, together with the process that started it, or in order.

Signals of a process that is not serving (while it serves, `process/lifecycle.py` handles them):

1. `install` runs before the imports, which take seconds. SIGINT or SIGTERM then prints one line and ends the process at
   once, because it owns nothing yet.
2. Code that owns folders or processes runs inside `unwinding`: a signal raises, and `with` blocks release them.
3. Inside `deferred`, signals wait for the end of the block: for starts and releases that must not stop halfway.

`watch_starter` ends the process when its standard input, or the process that started it, ends. `leave` ends it without
the teardown of its modules.

Only the standard library is imported, so that `install` is effective within milliseconds. Nothing here changes a
program that has its own handlers, such as one that uses `splitserve.Engine`.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Reason of an end in the last line of output, by signal.
END_REASONS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# Name of this process in that line.
_name = "this process"
# Restores a terminal in which a progress line hides the cursor: start of the line, erase it, show the cursor.
_RESTORE_TERMINAL = "\r\x1b[K\x1b[?25h"


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, so that it cannot end by itself. False without /proc."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[:1] == [b"T"]
    return False


def exit_code_of(number: int) -> int:
    """Return the exit code of a process that a signal has ended, as shells report it."""
    return 128 + number


def install(name: str | None = None) -> None:
    """Let SIGINT and SIGTERM end this process at once. Call it in the main thread, before the heavy imports.

    `name`: name of the process in its last line. None: unchanged.
    """
    global _name
    _name = name or _name
    for number in _SIGNALS:
        signal.signal(number, _end_at_once)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let signals raise while the block owns what must be released: KeyboardInterrupt, or SystemExit for SIGTERM.

    No-op inside another such block, in other threads, and if the program has its own handlers.
    """
    if not _is_main_thread() or signal.getsignal(signal.SIGINT) is not _end_at_once:
        yield
        return
    # asyncio replaces only this handler, by a cancellation of its main task.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        # The command line's library converts KeyboardInterrupt to SystemExit.
        code = exit_code_of(signal.SIGINT) if isinstance(end, KeyboardInterrupt) else end.code
        for number in _SIGNALS:
            if code == exit_code_of(number):
                _print_line(number)
        raise
    finally:
        install()


@contextmanager
def deferred() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends, then deliver the first of them. No-op in other threads."""
    if not _is_main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(held[0])


def _end_without_starter() -> NoReturn:
    os._exit(1)


# What to do when the process that started this one ends, and seconds from then until this one is ended by force.
_on_starter_end: tuple[Callable[[], object], float] | None = None


def _read_input() -> None:
    """Return when standard input ends."""
    # Read the descriptor, not sys.stdin: its lock, held by a blocked daemon thread, would abort the interpreter's exit.
    with suppress(OSError):
        while os.read(0, 4096):
            pass


def watch_starter(
    on_end: Callable[[], object] = _end_without_starter,
    grace: float = 0.0,
    wait_for_end: Callable[[], object] = _read_input,
) -> None:
    """Call `on_end` in a thread when the process that started this one ends: when `wait_for_end` returns.

    `grace` seconds later this process is ended by force. A later call replaces both, for the next stage of the life of
    the process, and not `wait_for_end`.
    """
    global _on_starter_end
    is_first, _on_starter_end = not is_starter_watched(), (on_end, grace)
    if is_first:
        threading.Thread(target=_end_with_starter, args=(wait_for_end,), name="starter-watch", daemon=True).start()


def is_starter_watched() -> bool:
    return _on_starter_end is not None


def _end_with_starter(wait_for_end: Callable[[], object]) -> None:
    wait_for_end()
    assert _on_starter_end is not None
    on_end, grace = _on_starter_end
    with suppress(RuntimeError):
        # RuntimeError: its event loop is closed, so the process is ending.
        on_end()
    threading.Event().wait(grace)
    _end_without_starter()


@contextmanager
def ending_with(fd: int) -> Iterator[None]:
    """End this process at once if the peer of `fd` hangs up within the block. The block must not own anything."""
    reader, writer = os.pipe()
    poll = select.poll()
    # Without events it waits for a hang-up alone. Input stays where it is, for the code after the block.
    poll.register(fd, 0)
    poll.register(reader, select.POLLIN)

    def watch() -> None:
        if any(found == fd for found, _ in poll.poll()):
            os._exit(0)

    thread = threading.Thread(target=watch, daemon=True, name="starter-watch")
    thread.start()
    try:
        yield
    finally:
        # No thread is left, so the process may fork.
        os.write(writer, b".")
        thread.join()
        os.close(writer)
        os.close(reader)


def leave(code: int | str | None) -> NoReturn:
    """End the process as `sys.exit` does, but without the teardown of its modules: with torch that takes seconds."""
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    _flush()
    os._exit(code or 0)


def _end_at_once(number: int, _: FrameType | None) -> NoReturn:
    _print_line(number)
    _flush()
    os._exit(exit_code_of(number))


def _exit(number: int, _: FrameType | None) -> NoReturn:
    # The release of what is owned takes bounded time: a second SIGTERM must not interrupt it.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(exit_code_of(number))


def _print_line(number: int) -> None:
    """Write past `sys.stderr`: the signal may have interrupted a write to it."""
    prefix = _RESTORE_TERMINAL if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{prefix}{END_REASONS[signal.Signals(number)]}: {_name} has ended\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: the signal interrupted a write to the stream. ValueError: the stream is closed.
        with suppress(OSError, RuntimeError, ValueError, AttributeError):
            stream.flush()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
