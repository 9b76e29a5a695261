"""Grammars in processes of their own, for the scheduler: no call here waits for the library.

`GrammarHost.compile` starts a process for the grammar (`grammar_process.py`) and returns the remote grammar. Each of
its matchers sends a token when it is accepted, and receives the mask of the next one (`grammar_link.py`). A token is
allowed if its bit is set, so `accept` need not wait.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from splitserve.core.errors import EngineError, GrammarBudgetError, SplitserveError
from splitserve.core.grammar import GrammarBudget, GrammarSpec
from splitserve.engine.grammar_link import (
    Advance,
    Compile,
    GrammarFailure,
    GrammarLink,
    GrammarSetup,
    GrammarWatch,
    NextMask,
)

# Approximate memory of a process besides its grammar, bytes.
_PROCESS_BYTES = 6 << 20
# If a mask takes less than this many CPU seconds, the next mask is expected within a step.
_QUICK = 0.002
# Seconds to wait for the end of the output, for models without an end-of-sequence token.
_END_TIMEOUT = 1.0
_CLOSING = "the worker is shutting down"


class GrammarHost:
    """GrammarCompiler that starts its server with the first grammar, which takes seconds longer.

    `wake` is called from a thread when a late mask has arrived or its process has ended.
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
        self._lock = threading.Lock()
        self._is_closed = False
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._watch = GrammarWatch(wake)
        self._links: weakref.WeakSet[GrammarLink] = weakref.WeakSet()

    def compile(self, spec: GrammarSpec) -> RemoteGrammar:
        """Compile a grammar and wait for it. Raises InvalidRequestError, GrammarBudgetError, EngineError."""
        link = self._connect(spec)
        link.send(Compile(spec))
        try:
            num_bytes = link.wait_compiled()
        except SplitserveError as error:
            link.close()
            if isinstance(error, GrammarBudgetError):
                self._check_server()
            raise
        return RemoteGrammar(link, num_bytes + _PROCESS_BYTES, self._eos_token_ids)

    def close(self) -> None:
        """End all processes. Calls of `compile` that still wait raise EngineError."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for link in list(self._links):
                link.interrupt(EngineError(_CLOSING))
            if self._server is not None and self._control is not None:
                self._control.close()
                self._server.kill()
                self._server.wait()
        self._watch.close()

    def _connect(self, spec: GrammarSpec) -> GrammarLink:
        """Start a process and return the connection to it."""
        with self._lock:
            if self._is_closed:
                raise EngineError(_CLOSING)
            if self._has_ended():
                self._start_server()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            link = GrammarLink(ours, spec, self._budget, self._watch)
            with theirs:
                try:
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                except OSError as error:
                    link.close()
                    raise EngineError(f"the grammar server has ended: {error}. Retry") from error
            self._links.add(link)
            return link

    def _check_server(self) -> None:
        """Raise EngineError if the server of all grammar processes has ended."""
        with self._lock:
            if self._is_closed:
                raise EngineError(_CLOSING)
            if self._server is not None and self._has_ended():
                code = self._server.wait()
                raise EngineError(f"the grammar server has ended with exit code {code}: see the log of the worker")

    def _has_ended(self) -> bool:
        """Return whether no server runs. The kernel closes its socket before those of the orders in its queue."""
        try:
            return self._control is None or not self._control.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _start_server(self) -> None:
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.wait()
        self._watch.start()
        self._control, theirs = socket.socketpair()
        # Threads would not survive a fork.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._server = subprocess.Popen(self._command, stdin=theirs.fileno(), env=env)


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
        # The process may have ended while no matcher read from it.
        self.link.pull()
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

    def take(self, message: NextMask | GrammarFailure) -> None:
        """Store the reply to the last tokens."""
        if isinstance(message, GrammarFailure):
            self._failure = message.error(param=self._link.spec.kind)
            return
        self._mask = message.words
        self._is_terminated = not message.words
        self._is_quick = message.seconds < _QUICK

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
