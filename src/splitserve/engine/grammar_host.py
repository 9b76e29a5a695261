"""Grammars in processes of their own, for the scheduler: no call here waits for the library.

`GrammarHost.compile` starts a process for the grammar (`grammar_process.py`) and returns the remote grammar. Its
matchers read their masks from that process (`grammar_link.py`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from splitserve.core.errors import EngineError, GrammarBudgetError, SplitserveError
from splitserve.core.grammar import GrammarBudget, GrammarSpec
from splitserve.engine.grammar_link import GrammarLink, GrammarWatch, RemoteGrammar
from splitserve.engine.grammar_wire import Compile, GrammarSetup

# Approximate memory of a process besides its grammar, bytes.
_PROCESS_BYTES = 6 << 20
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
        link.send(Compile(spec.kind, spec.text, spec.strict))
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
            if self._server is None or self._server.poll() is not None:
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
            if self._server is not None and (code := self._server.poll()) is not None:
                raise EngineError(f"the grammar server has ended with exit code {code}: see the log of the worker")

    def _start_server(self) -> None:
        if self._control is not None:
            self._control.close()
        self._watch.start()
        self._control, theirs = socket.socketpair()
        # Threads would not survive a fork.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._server = subprocess.Popen(self._command, stdin=theirs.fileno(), env=env)
