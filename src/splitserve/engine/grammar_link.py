"""Connection to one grammar process, and the grammar and matchers that it serves.

Each matcher sends a token when it is accepted and receives the mask of the next one. A token is allowed if its bit is
set, so `accept` need not wait. The thread that needs a mask reads it: a thread of its own for the connections would
compete with the model for the interpreter. One thread only wakes the scheduler when a mask arrives that was late.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from splitserve.core.errors import EngineError, GrammarBudgetError, InvalidRequestError, SplitserveError
from splitserve.core.grammar import GrammarBudget, GrammarSpec, refused_output
from splitserve.engine.grammar_wire import (
    Advance,
    Compiled,
    Drop,
    FromGrammar,
    GrammarLibraryFailure,
    NextMask,
    OverBudget,
    Refused,
    Rejected,
    ToGrammar,
)

# Seconds between two checks for the end while a grammar is compiled.
_POLL_TIMEOUT = 1.0
_RECEIVE_BYTES = 1 << 20
# If a mask takes less than this many CPU seconds, the next mask is expected within a step.
_QUICK = 0.002
# Seconds to wait for the end of the output, for models without an end-of-sequence token.
_END_TIMEOUT = 1.0
_REMEDY = (
    "Remove alternatives that match the same text, and nested or long repetitions, or raise --grammar-step-budget, "
    "--grammar-request-budget, --grammar-compile-budget or --grammar-memory"
)


class GrammarWatch:
    """Thread that calls `wake` once when a connection that was passed to `add` can be read."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._epoll = select.epoll()
        self._end, self._ended = socket.socketpair()
        self._epoll.register(self._ended, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="grammar-watch", daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def register(self, connection: socket.socket) -> None:
        self._epoll.register(connection, select.EPOLLONESHOT)

    def add(self, connection: socket.socket) -> None:
        # OSError, ValueError: closed by another thread.
        with suppress(OSError, ValueError):
            self._epoll.modify(connection, select.EPOLLIN | select.EPOLLONESHOT)

    def close(self) -> None:
        self._end.close()
        if self._thread.is_alive():
            self._thread.join()
        self._ended.close()
        self._epoll.close()

    def _run(self) -> None:
        while not any(fd == self._ended.fileno() for fd, _ in self._epoll.poll()):
            self._wake()


class GrammarLink:
    """The connection to one grammar process. Used by the threads of scheduler and engine."""

    def __init__(
        self, connection: socket.socket, spec: GrammarSpec, budget: GrammarBudget, watch: GrammarWatch
    ) -> None:
        connection.setblocking(False)
        watch.register(connection)
        self._connection = connection
        self._spec = spec
        self._budget = budget
        self._watch = watch
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._received = bytearray()
        self._decoder: msgspec.msgpack.Decoder[FromGrammar] = msgspec.msgpack.Decoder(FromGrammar)
        # Matchers that their requests still use, by number.
        self._matchers: weakref.WeakValueDictionary[int, RemoteMatcher] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        # Numbers of matchers to forget, sent with the next message.
        self._dropped: deque[int] = deque()
        # Size of the compiled grammar, bytes. None: it is not compiled yet.
        self._num_bytes: int | None = None
        # Error after which the process serves no matcher. None: it serves.
        self.failure: SplitserveError | None = None

    def wait_compiled(self) -> int:
        """Return the size of the compiled grammar. Raises the failure."""
        while self._num_bytes is None and self.failure is None:
            self.pull(_POLL_TIMEOUT)
        if self.failure is not None:
            raise type(self.failure)(self.failure.message, param=self.failure.param)
        assert self._num_bytes is not None
        return self._num_bytes

    def add(self, matcher: RemoteMatcher) -> int:
        number = next(self._numbers)
        with self._lock:
            self._matchers[number] = matcher
        return number

    def drop(self, number: int) -> None:
        """Forget a matcher. Takes no lock: the garbage collector may call it anywhere."""
        self._dropped.append(number)

    def send(self, message: ToGrammar) -> None:
        """Send as much as the connection takes, and the rest in later calls."""
        with self._lock:
            while self._dropped:
                self._unsent += _frame(Drop(self._dropped.popleft()))
            self._unsent += _frame(message)
            self._flush()

    def pull(self, timeout: float = 0.0) -> None:
        """Receive what has arrived. If nothing has, wait up to `timeout` seconds for data."""
        with self._lock:
            self._flush()
            if timeout > 0:
                self._wait(timeout)
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._received += data
                self._take_frames()
            else:
                self._lose()

    def watch(self) -> None:
        """Wake the scheduler when something arrives."""
        self._watch.add(self._connection)

    def interrupt(self, error: SplitserveError) -> None:
        """Fail with `error`. A thread that waits for this connection returns."""
        self.failure = error
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # The process has ended, which `pull` finds.
            self._unsent.clear()

    def _wait(self, timeout: float) -> None:
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.poll(timeout * 1000)

    def _take_frames(self) -> None:
        start = 0
        while len(self._received) - start >= 4:
            end = start + 4 + int.from_bytes(self._received[start : start + 4], "big")
            if len(self._received) < end:
                break
            self._take(self._decoder.decode(self._received[start + 4 : end]))
            start = end
        del self._received[:start]

    def _take(self, message: FromGrammar) -> None:
        match message:
            case Compiled():
                self._num_bytes = message.num_bytes
            case Rejected():
                self.failure = InvalidRequestError(message.message, param=self._spec.kind)
            case GrammarLibraryFailure() if message.number < 0:
                self.failure = EngineError(f"its grammar could not be compiled: {message.message}")
            case _:
                if (matcher := self._matchers.get(message.number)) is not None:
                    matcher.take(message)

    def _lose(self) -> None:
        """Fail for good: the process has ended."""
        self.failure = self.failure or GrammarBudgetError(
            f"its {self._spec.kind} ended the process that computes it: one call needed more than "
            f"{self._budget.compile:g} s of CPU time to compile, several times {self._budget.step:g} s for a token, or "
            f"more memory than {self._budget.memory >> 20} MiB. {_REMEDY}",
            param=self._spec.kind,
        )


def _frame(message: ToGrammar) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("!i", len(payload)) + payload


class RemoteGrammar:
    """CompiledGrammar. Its process ends with the last reference to it, matchers included."""

    def __init__(self, link: GrammarLink, num_bytes: int, eos_token_ids: frozenset[int]) -> None:
        self.link = link
        self.num_bytes = num_bytes
        self.eos_token_ids = eos_token_ids

    def __del__(self) -> None:
        self.link.close()

    @property
    def is_usable(self) -> bool:
        return self.link.failure is None

    def matcher(self, output_ids: Sequence[int] = ()) -> RemoteMatcher:
        return RemoteMatcher(self, output_ids)


class RemoteMatcher:
    """GrammarMatcher with masks from a grammar process."""

    def __init__(self, grammar: RemoteGrammar, output_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._link = grammar.link
        # The next mask. None: it has not arrived.
        self._mask: bytes | None = None
        self._is_quick = True
        self._is_terminated = False
        self._given = output_ids
        self._failure: SplitserveError | None = None
        self._number = self._link.add(self)
        self._link.send(Advance(self._number, list(output_ids)))

    def __del__(self) -> None:
        self._link.drop(self._number)

    @property
    def failure(self) -> SplitserveError | None:
        return self._failure or self._link.failure

    def is_ready(self, *, soon: bool = False) -> bool:
        if soon and self._is_quick:
            return True
        if not self._arrives_by(0.0):
            self._link.watch()
            return False
        return True

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        if token_id in self._grammar.eos_token_ids:
            self._is_terminated = True
            return True
        self._mask = None
        self._link.send(Advance(self._number, [token_id]))
        return True

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        """Write the mask, as GrammarMatcher defines it. Raises the failure."""
        if not self._arrives_by(time.monotonic() + timeout):
            # The mask is late: do not plan with the next one before it is ready.
            self._is_quick = False
            return False
        if (failure := self.failure) is not None:
            # A copy: the traceback of the original would keep this matcher, and with it the process.
            raise type(failure)(failure.message)
        assert self._mask is not None
        words.cast("B")[:] = self._mask
        return True

    def is_terminated(self) -> bool:
        # Without an end-of-sequence token, only the library can find the end.
        if not self._grammar.eos_token_ids:
            self._arrives_by(time.monotonic() + _END_TIMEOUT)
        return self._is_terminated

    def take(self, message: NextMask | Refused | OverBudget | GrammarLibraryFailure) -> None:
        """Store the reply to the last tokens."""
        match message:
            case NextMask():
                self._mask = message.words
                self._is_terminated = not message.words
                self._is_quick = message.seconds < _QUICK
            case Refused():
                self._failure = refused_output(self._given[message.index], message.index)
            case OverBudget():
                self._failure = GrammarBudgetError(f"its grammar is too slow: {message.message}. {_REMEDY}")
            case GrammarLibraryFailure():
                self._failure = EngineError(f"its grammar failed: {message.message}")

    def _arrives_by(self, deadline: float) -> bool:
        """Return whether a mask or a failure arrives by `deadline`, in seconds of the monotonic clock."""
        while self._mask is None and self.failure is None:
            remaining = max(0.0, deadline - time.monotonic())
            self._link.pull(remaining)
            if remaining == 0.0:
                break
        return self._mask is not None or self.failure is not None

    def _allows(self, token_id: int) -> bool:
        """Return whether the current mask has the token."""
        if self.failure is not None or self._mask is None or token_id >> 3 >= len(self._mask):
            return False
        return bool(self._mask[token_id >> 3] >> (token_id & 7) & 1)
