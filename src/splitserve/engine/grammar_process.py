"""The processes in which grammars are compiled and matched: `python -m splitserve.engine.grammar_process SETUP`.

1. The grammar server imports the library and reads the tokenizer. Its standard input is a socket.
2. For each socket that arrives there it forks: a grammar process for one grammar, which shares that memory.
3. A grammar process compiles its grammar and serves all matchers of it, until its socket is closed.

A call into the library cannot be interrupted, so the kernel kills a grammar process if a call exceeds its CPU time.
Compilations have the lowest priority, and so has a process from its first slow call on: they compute while the model
leaves cores idle, or while it waits for a mask.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarBudget, GrammarSpec
from splitserve.engine.grammar import XGrammar, XGrammarCompiler, XGrammarMatcher, is_out_of_memory
from splitserve.engine.grammar_wire import (
    Advance,
    Compile,
    Compiled,
    Drop,
    FromGrammar,
    GrammarLibraryFailure,
    GrammarSetup,
    NextMask,
    OverBudget,
    Refused,
    Rejected,
    ToGrammar,
)

_LOWEST_PRIORITY = 19
# CPU seconds of a call from which on the process has the lowest priority. A usual mask takes a tenth.
_SLOW = 0.002
# Multiple of a step's CPU budget. A call above the budget ends its request; a call above this multiple ends the
# process.
_HARD_LIMIT = 4.0


class _Sample:
    """One matcher and the CPU time that it has used."""

    def __init__(self, matcher: XGrammarMatcher) -> None:
        self.matcher = matcher
        self.seconds = 0.0


class GrammarProcess:
    """Server of one grammar on one connection. Single-threaded."""

    def __init__(self, connection: Connection, compiler: XGrammarCompiler, budget: GrammarBudget) -> None:
        self._connection = connection
        self._compiler = compiler
        self._budget = budget
        self._decoder: msgspec.msgpack.Decoder[ToGrammar] = msgspec.msgpack.Decoder(ToGrammar)
        self._samples: dict[int, _Sample] = {}
        self._words = np.zeros(-(-compiler.vocab_size // 32), dtype=np.int32)

    def run(self) -> None:
        """Return at the end of the connection, if the grammar cannot be compiled, or if memory is used up."""
        _limit_memory(self._budget.memory)
        try:
            grammar = self._compile(self._receive())
            while grammar is not None:
                self._serve(grammar, self._receive())
        except (EOFError, OSError, MemoryError):
            return

    def _receive(self) -> ToGrammar:
        return self._decoder.decode(self._connection.recv_bytes())

    def _send(self, message: FromGrammar) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _compile(self, order: ToGrammar) -> XGrammar | None:
        assert isinstance(order, Compile)
        try:
            with _cpu_limit(self._budget.compile):
                spec = GrammarSpec(order.kind, order.text, order.strict)
                grammar = _with_lowest_priority(lambda: self._compiler.compile(spec))
        except InvalidRequestError as error:
            self._send(Rejected(error.message))
            return None
        except MemoryError:
            raise
        except Exception as error:
            self._send(GrammarLibraryFailure(f"{type(error).__name__}: {error}"))
            return None
        self._send(Compiled(grammar.num_bytes))
        return grammar

    def _serve(self, grammar: XGrammar, order: ToGrammar) -> None:
        if isinstance(order, Drop):
            self._samples.pop(order.number, None)
        elif isinstance(order, Advance):
            sample = self._samples.get(order.number)
            if sample is None:
                sample = self._samples[order.number] = _Sample(grammar.matcher())
            self._send(self._advance(order, sample))

    def _advance(self, order: Advance, sample: _Sample) -> FromGrammar:
        budget = self._budget
        # Output of another worker is replayed within the budget of the request.
        limit = budget.request if len(order.token_ids) > 1 else budget.step
        began = time.thread_time()
        try:
            with _cpu_limit(_HARD_LIMIT * limit):
                for index, token_id in enumerate(order.token_ids):
                    if not sample.matcher.accept(token_id):
                        return Refused(order.number, index)
                words = self._next_words(sample.matcher)
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from error
            return GrammarLibraryFailure(f"{type(error).__name__}: {error}", order.number)
        seconds = time.thread_time() - began
        sample.seconds += seconds
        if seconds > _SLOW:
            _lower_priority()
        if seconds > limit or sample.seconds > budget.request:
            del self._samples[order.number]
            return OverBudget(order.number, _over_budget(seconds, sample.seconds, budget))
        return NextMask(order.number, words, seconds)

    def _next_words(self, matcher: XGrammarMatcher) -> bytes:
        if matcher.is_terminated():
            return b""
        matcher.fill_bitmask(self._words.data)
        return self._words.tobytes()


def _over_budget(last: float, total: float, budget: GrammarBudget) -> str:
    return (
        f"it used {last:.3g} s of CPU time for its last token and {total:.3g} s in all, allowed are {budget.step:g} s "
        f"and {budget.request:g} s"
    )


def _lower_priority() -> None:
    """Give the lowest priority to the calling thread."""
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)


def _with_lowest_priority(call: Callable[[], XGrammar]) -> XGrammar:
    """Run `call` in a thread: a process without privileges cannot raise its own priority again."""
    outcome: list[XGrammar | Exception] = []

    def run() -> None:
        _lower_priority()
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError as error:
        # There is no memory for the stack of the thread.
        raise MemoryError from error
    thread.join()
    if not outcome:
        # The thread had no memory to report its end.
        raise MemoryError
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process after `seconds` of CPU time in the block."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(num_bytes: int) -> None:
    """Allow `num_bytes` more than this process has now."""
    with Path("/proc/self/statm").open() as file:
        num_data_pages = int(file.read().split()[5])
    limit = num_data_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _fork(fd: int, control: socket.socket, compiler: XGrammarCompiler, budget: GrammarBudget) -> None:
    """Start a grammar process on the socket `fd`."""
    try:
        if os.fork():
            return
    except OSError as error:
        # The scheduler finds its socket closed.
        sys.stderr.write(f"the grammar server cannot fork: {error}\n")
        return
    code = 1
    try:
        control.close()
        GrammarProcess(Connection(fd), compiler, budget).run()
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    # The scheduler ends this process, also after Ctrl-C. Processes that end need no parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    setup = msgspec.json.decode(sys.argv[1], type=GrammarSetup)
    compiler = XGrammarCompiler(Path(setup.folder), setup.vocab_size, frozenset(setup.eos_token_ids))
    compiler.load()
    gc.collect()
    # The collector would write to memory that the processes share.
    gc.freeze()
    control = socket.socket(fileno=os.dup(0))
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        _fork(fds[0], control, compiler, setup.budget)
        os.close(fds[0])


if __name__ == "__main__":
    main()
