"""Grammars in processes of their own, as the scheduler uses them: no call here waits for the library.

`GrammarHost.compile` starts a process for the grammar (`grammar_process.py`). Each matcher sends a token when it is
accepted and receives the mask of the next one. A token is allowed if its bit is set, so `accept` need not wait.
One thread reads and writes all connections.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from splitserve.core.grammar import GrammarBudget, GrammarSpec, refused_output
from splitserve.engine.grammar_wire import (
    Advance,
    Broken,
    Compile,
    Compiled,
    Drop,
    FromGrammar,
    GrammarSetup,
    NextMask,
    OverBudget,
    Refused,
    Rejected,
    ToGrammar,
)
from splitserve.errors import EngineError, GrammarBudgetError, InvalidRequestError, SplitserveError

# Approximate memory of a process besides its grammar, bytes.
_PROCESS_BYTES = 6 << 20
_CLOSING = "the worker is shutting down"
# CPU seconds below which the next mask is expected within a step.
_QUICK = 0.002
# Seconds to wait for the end of the output, for models without an end-of-sequence token.
_END_TIMEOUT = 1.0
_REMEDY = (
    "Remove alternatives that match the same text, and nested or long repetitions, or raise --grammar-step-budget, "
    "--grammar-request-budget, --grammar-compile-budget or --grammar-memory"
)


class GrammarHost:
    """GrammarCompiler that starts its server with the first grammar, which takes seconds longer.

    `wake` is called from the thread of the connections when a mask has arrived or a matcher has failed.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        budget: GrammarBudget,
        wake: Callable[[], None],
    ) -> None:
        setup = GrammarSetup(str(folder), vocab_size, sorted(eos_token_ids), budget)
        self._command = [sys.executable, "-m", "splitserve.engine.grammar_process", msgspec.json.encode(setup).decode()]
        self._eos_token_ids = eos_token_ids
        self._budget = budget
        self._wake = wake
        self._lock = threading.Lock()
        self._is_closed = False
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grammar-links", daemon=True)
        self._links: weakref.WeakSet[_Link] = weakref.WeakSet()

    def compile(self, spec: GrammarSpec) -> RemoteGrammar:
        """Compile a grammar and wait for it. Raises InvalidRequestError, GrammarBudgetError, EngineError."""
        link = _Link(self._loop, spec, self._budget, self._wake)
        self._connect(link)
        link.send(Compile(spec.kind, spec.text, spec.strict))
        try:
            num_bytes = link.compiled.result()
        except GrammarBudgetError:
            self._check_server()
            raise
        return RemoteGrammar(link, num_bytes + _PROCESS_BYTES, self._eos_token_ids)

    def close(self) -> None:
        """End all processes. Calls of `compile` that still wait raise EngineError."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._server is None or self._control is None:
                self._loop.close()
                return
            self._control.close()
            self._server.kill()
            self._server.wait()
        links = list(self._links)
        for link in links:
            link.failure = EngineError(_CLOSING)
            link.close()
        for link in links:
            link.closed.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _connect(self, link: _Link) -> None:
        """Start a process and connect `link` with it."""
        # The lock is held until the loop has connected, so that `close` does not stop the loop before.
        with self._lock:
            if self._is_closed:
                raise EngineError(_CLOSING)
            if self._server is None or self._server.poll() is not None:
                self._start_server()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise EngineError(f"the grammar server has ended: {error}. Retry") from error
            connecting = self._loop.create_connection(lambda: link, sock=ours)
            asyncio.run_coroutine_threadsafe(connecting, self._loop).result()
            self._links.add(link)

    def _check_server(self) -> None:
        """Raise EngineError if the server of all grammar processes has ended."""
        with self._lock:
            if self._is_closed:
                raise EngineError(_CLOSING)
            if self._server is not None and (code := self._server.poll()) is not None:
                raise EngineError(f"the grammar server has ended with exit code {code}: see the log of the worker")

    def _start_server(self) -> None:
        if self._control is not None:
            self._control.close()
        if not self._thread.is_alive():
            self._thread.start()
        self._control, theirs = socket.socketpair()
        # Threads would not survive a fork.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._server = subprocess.Popen(self._command, stdin=theirs.fileno(), env=env)


class _Link(asyncio.Protocol):
    """The connection to one grammar process."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, spec: GrammarSpec, budget: GrammarBudget, wake: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._budget = budget
        self._wake = wake
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(FromGrammar)
        # Matchers that their requests still use, by number.
        self._matchers: weakref.WeakValueDictionary[int, RemoteMatcher] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        # Size of the compiled grammar, bytes.
        self.compiled: Future[int] = Future()
        self.closed: Future[None] = Future()
        # Error after which the process serves no matcher. None: it serves.
        self.failure: SplitserveError | None = None

    def add(self, matcher: RemoteMatcher) -> int:
        number = next(self._numbers)
        self._matchers[number] = matcher
        return number

    def send(self, message: ToGrammar) -> None:
        payload = msgspec.msgpack.encode(message)
        # RuntimeError: the loop is closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._write, struct.pack("!i", len(payload)) + payload)

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 4:
            end = 4 + int.from_bytes(self._received[:4], "big")
            if len(self._received) < end:
                return
            message = self._decoder.decode(memoryview(self._received)[4:end])
            del self._received[:end]
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.failure = self.failure or GrammarBudgetError(
            f"its {self._spec.kind} ended the process that computes it: one call needed more than "
            f"{self._budget.compile:g} s of CPU time to compile, several times {self._budget.step:g} s for a token, or "
            f"more memory than {self._budget.memory >> 20} MiB. {_REMEDY}",
            param=self._spec.kind,
        )
        if not self.compiled.done():
            self.compiled.set_exception(self.failure)
        for matcher in list(self._matchers.values()):
            matcher.fail(self.failure)
        self.closed.set_result(None)
        self._wake()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: FromGrammar) -> None:
        match message:
            case Compiled():
                self.compiled.set_result(message.num_bytes)
                return
            case Rejected():
                self.compiled.set_exception(InvalidRequestError(message.message, param=self._spec.kind))
                return
            case Broken() if message.number < 0:
                self.compiled.set_exception(EngineError(f"its grammar could not be compiled: {message.message}"))
                return
        matcher = self._matchers.get(message.number)
        if matcher is not None and matcher.take(message):
            self._wake()


class RemoteGrammar:
    """CompiledGrammar. Its process ends with the last reference to it, matchers included."""

    def __init__(self, link: _Link, num_bytes: int, eos_token_ids: frozenset[int]) -> None:
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
        self._mask = b""
        # Set when a mask, the end or a failure has arrived.
        self._arrived = threading.Event()
        self._is_quick = True
        # True: the scheduler found the mask not ready, and must be woken.
        self._is_awaited = False
        self._is_terminated = False
        self._given = output_ids
        self._failure: SplitserveError | None = None
        self._number = self._link.add(self)
        self._link.send(Advance(self._number, list(output_ids)))

    def __del__(self) -> None:
        self._link.send(Drop(self._number))

    @property
    def failure(self) -> SplitserveError | None:
        return self._failure or self._link.failure

    def is_ready(self, *, soon: bool = False) -> bool:
        if soon and self._is_quick:
            return True
        return self._arrives_within(0.0)

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        if token_id in self._grammar.eos_token_ids:
            self._is_terminated = True
            return True
        self._arrived.clear()
        self._link.send(Advance(self._number, [token_id]))
        return True

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        """Write the mask, as GrammarMatcher defines it. Raises the failure."""
        if not self._arrives_within(timeout):
            # The mask is late: do not plan with the next one before it is ready.
            self._is_quick = False
            return False
        if (failure := self.failure) is not None:
            raise failure
        words.cast("B")[:] = self._mask
        return True

    def is_terminated(self) -> bool:
        # Without an end-of-sequence token, only the library can find the end.
        if not self._grammar.eos_token_ids:
            self._arrived.wait(_END_TIMEOUT)
        return self._is_terminated

    def take(self, message: NextMask | Refused | OverBudget | Broken) -> bool:
        """Store the reply to the last tokens. Return whether the scheduler waits for it."""
        match message:
            case NextMask():
                self._mask = message.words
                self._is_terminated = not message.words
                self._is_quick = message.seconds < _QUICK
                self._arrived.set()
            case Refused():
                self.fail(refused_output(self._given[message.index], message.index))
            case OverBudget():
                self.fail(
                    GrammarBudgetError(f"its grammar is too slow: {message.message}. To make it faster, {_REMEDY}")
                )
            case Broken():
                self.fail(EngineError(f"its grammar failed: {message.message}"))
        is_awaited, self._is_awaited = self._is_awaited, False
        return is_awaited or self._failure is not None

    def _arrives_within(self, timeout: float) -> bool:
        if self._arrived.is_set():
            return True
        # Before the second check, so that an arrival between the two is not missed.
        self._is_awaited = True
        return self._arrived.wait(timeout)

    def fail(self, error: SplitserveError) -> None:
        self._failure = error
        self._arrived.set()

    def _allows(self, token_id: int) -> bool:
        """Return whether the current mask has the token."""
        if self.failure is not None or not self._arrived.is_set() or token_id >> 3 >= len(self._mask):
            return False
        return bool(self._mask[token_id >> 3] >> (token_id & 7) & 1)
