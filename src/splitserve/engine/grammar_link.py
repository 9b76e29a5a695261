"""The connection to one grammar process, and its messages: msgpack after a length of four bytes, network order.

That is also the framing of `multiprocessing.connection.Connection`, which the grammar process uses. The thread that
needs a mask reads it: a thread of its own for the connections would compete with the model for the interpreter. One
thread only wakes the scheduler when a mask arrives that was late.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

from splitserve.core.errors import EngineError, GrammarBudgetError, InvalidRequestError, SplitserveError
from splitserve.core.grammar import GrammarBudget, GrammarSpec
from splitserve.core.options import size_text

if TYPE_CHECKING:
    from splitserve.engine.grammar_host import RemoteMatcher

# Seconds between two checks for the end while a grammar is compiled.
_POLL_TIMEOUT = 1.0
_RECEIVE_BYTES = 1 << 20
BUDGET_REMEDY = (
    "Remove alternatives that match the same text, and nested or long repetitions, or raise --grammar-step-budget, "
    "--grammar-request-budget, --grammar-compile-budget or --grammar-memory"
)


class GrammarSetup(msgspec.Struct, frozen=True):
    """Settings of a grammar server, as JSON in its command line."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]
    budget: GrammarBudget


class Compile(msgspec.Struct, frozen=True, tag=True):
    """The first message to a grammar process: its one grammar."""

    spec: GrammarSpec


class Advance(msgspec.Struct, frozen=True, tag=True):
    """Accept tokens and return the next mask. An unknown number starts a matcher."""

    number: int
    token_ids: list[int]


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget a matcher."""

    number: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


_ERRORS = {"request": InvalidRequestError, "budget": GrammarBudgetError, "engine": EngineError}


class GrammarFailure(msgspec.Struct, frozen=True, tag=True):
    """The compilation (number -1) or one matcher has failed. The matcher is dropped."""

    number: int
    # The grammar or the output is at fault, it is over budget, or the library failed.
    cause: Literal["request", "budget", "engine"]
    message: str

    def error(self, param: str | None = None) -> SplitserveError:
        return _ERRORS[self.cause](self.message, param=param if self.cause == "request" else None)


class NextMask(msgspec.Struct, frozen=True, tag=True):
    number: int
    # One bit per token, see `GrammarMatcher.fill_bitmask`. Empty: the matcher has terminated.
    words: bytes
    # CPU time that the tokens and the mask needed.
    seconds: float


ToGrammar = Compile | Advance | Drop
FromGrammar = Compiled | GrammarFailure | NextMask


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
        self.spec = spec
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
        if isinstance(message, Compiled):
            self._num_bytes = message.num_bytes
        elif isinstance(message, GrammarFailure) and message.number < 0:
            self.failure = message.error(param=self.spec.kind)
        elif (matcher := self._matchers.get(message.number)) is not None:
            matcher.take(message)

    def _lose(self) -> None:
        """Fail for good: the process has ended."""
        self.failure = self.failure or GrammarBudgetError(
            f"its {self.spec.kind} ended the process that computes it: one call needed more than "
            f"{self._budget.compile:g} s of CPU time to compile, several times {self._budget.step:g} s for a token, or "
            f"more memory than {size_text(self._budget.memory)}. {BUDGET_REMEDY}",
            param=self.spec.kind,
        )


def _frame(message: ToGrammar) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("!i", len(payload)) + payload
