"""The processes in which grammars are compiled and matched: `python -m splitserve.engine.grammar_process SETUP`.

1. The grammar server imports xgrammar (Dong et al., arXiv:2411.15100) and reads the tokenizer. Its standard input is a
   socket.
2. For each socket that arrives there it forks: a grammar process for one grammar, which shares that memory.
3. A grammar process compiles its grammar and serves all matchers of it, until its socket is closed.

A call into the library may need any time and memory, and cannot be interrupted. So the kernel kills a grammar process
if a call exceeds its CPU time. Compilations have the lowest priority, and so has a process from its first slow call on:
they compute while the model leaves cores idle, or while it waits for a mask.

Special tokens have no text here, so that no grammar can contain one; only the end-of-sequence tokens may follow a
complete grammar.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import MAX_JSON_WHITESPACE, GrammarBudget, GrammarKind, GrammarSpec, refused_output
from splitserve.engine.grammar_link import (
    BUDGET_REMEDY,
    Advance,
    Compile,
    Compiled,
    Drop,
    FromGrammar,
    GrammarFailure,
    GrammarSetup,
    NextMask,
    ToGrammar,
)

if TYPE_CHECKING:
    import xgrammar


# The library's errors begin with a time and a position in its source.
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is (false|true): )?")


class XGrammarCompiler:
    """Compiler of the library. `vocab_size`: the model's, which may be padded beyond the tokenizer's."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def compile(self, spec: GrammarSpec) -> XGrammar:
        compiler = self._compiler
        try:
            grammar = XGrammar(_compile(compiler, spec), ends_by_itself=not self._eos_token_ids)
            is_possible = self._can_begin(grammar)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise MemoryError from error
            cause = _PLACE.sub("", str(error)).strip()[:500]
            raise InvalidRequestError(f"{spec.kind} cannot be compiled: {cause}", param=spec.kind) from None
        if not is_possible:
            raise InvalidRequestError(f"{spec.kind} allows no output: no text matches it", param=spec.kind)
        return grammar

    def _can_begin(self, grammar: XGrammar) -> bool:
        """Return whether any token but the end may be the first."""
        bits = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        grammar.matcher().fill_next_token_bitmask(bits)
        first = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=self.vocab_size, bitorder="little"))
        return not set(first.tolist()) <= self._eos_token_ids

    def load(self) -> None:
        """Import the library and read the tokenizer now."""
        _ = self._compiler

    @functools.cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        # One thread per grammar and no cache: the grammar queue has both.
        return xgrammar.GrammarCompiler(self._vocabulary(), max_threads=1, cache_enabled=False)

    def _vocabulary(self) -> xgrammar.TokenizerInfo:
        import xgrammar
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer takes seconds to import.
        loader = PreTrainedTokenizerFast if (self._folder / "tokenizer.json").is_file() else AutoTokenizer
        tokenizer = loader.from_pretrained(str(self._folder), local_files_only=True)
        stop = sorted(self._eos_token_ids)
        seen = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.vocab_size, stop_token_ids=stop or [tokenizer.eos_token_id or 0]
        )
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        texts = [b"" if i in special else text for i, text in enumerate(seen.decoded_vocab)]
        return xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=stop,
            add_prefix_space=seen.add_prefix_space,
        )


class XGrammar:
    """A compiled grammar of the library.

    `ends_by_itself`: the model has no end-of-sequence token, so the output ends at the first possible end.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, *, ends_by_itself: bool) -> None:
        self._compiled = compiled
        self._ends_by_itself = ends_by_itself
        self.num_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> xgrammar.GrammarMatcher:
        """Return a matcher. Its calls have no time limit."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=self._ends_by_itself)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of the library means that it could not allocate memory."""
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> Any:
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return compiler.compile_json_schema(spec.text, strict_mode=spec.strict, max_whitespace_cnt=MAX_JSON_WHITESPACE)
    compile_text: dict[GrammarKind, Callable[[str], Any]] = {
        GrammarKind.REGEX: compiler.compile_regex,
        GrammarKind.EBNF: compiler.compile_grammar,
        GrammarKind.STRUCTURAL_TAG: compiler.compile_structural_tag,
    }
    return compile_text[spec.kind](spec.text)


_LOWEST_PRIORITY = 19
# CPU seconds of a call from which on the process has the lowest priority. A usual mask takes a tenth.
_SLOW = 0.002
# Multiple of a step's CPU budget. A call above the budget ends its request; a call above this multiple ends the
# process.
_HARD_LIMIT = 4.0


@dataclass(slots=True)
class _Sample:
    """One matcher and the CPU time that it has used."""

    matcher: xgrammar.GrammarMatcher
    num_tokens: int = 0
    seconds: float = 0.0


class GrammarProcess:
    """Server of one grammar on one connection. Single-threaded."""

    def __init__(self, connection: Connection, compiler: XGrammarCompiler, budget: GrammarBudget) -> None:
        self._connection = connection
        self._compiler = compiler
        self._budget = budget
        self._decoder: msgspec.msgpack.Decoder[ToGrammar] = msgspec.msgpack.Decoder(ToGrammar)
        self._samples: dict[int, _Sample] = {}
        self._words = np.zeros(-(-compiler.vocab_size // 32), dtype=np.int32)
        # The library may set bits beyond the vocabulary.
        bits = np.arange(32 * len(self._words)) < compiler.vocab_size
        self._vocabulary = np.packbits(bits, bitorder="little").view(np.int32)

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
                grammar = _with_lowest_priority(lambda: self._compiler.compile(order.spec))
        except InvalidRequestError as error:
            self._send(GrammarFailure(-1, "request", error.message))
            return None
        except MemoryError:
            raise
        except Exception as error:
            cause = f"its grammar could not be compiled: {type(error).__name__}: {error}"
            self._send(GrammarFailure(-1, "engine", cause))
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
                    if not sample.matcher.accept_token(token_id):
                        return GrammarFailure(order.number, "request", refused_output(token_id, index).message)
                sample.num_tokens += len(order.token_ids)
                words = self._next_words(sample.matcher)
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from error
            return GrammarFailure(order.number, "engine", f"its grammar failed: {type(error).__name__}: {error}")
        seconds = time.thread_time() - began
        sample.seconds += seconds
        if seconds > _SLOW:
            _lower_priority()
        if seconds > limit or sample.seconds > budget.request:
            del self._samples[order.number]
            message = (
                f"its grammar is too slow: it used {seconds:.3g} s of CPU time for its last token and "
                f"{sample.seconds:.3g} s in all, allowed are {budget.step:g} s and {budget.request:g} s. "
                f"{BUDGET_REMEDY}"
            )
            return GrammarFailure(order.number, "budget", message)
        if words and not (self._words & self._vocabulary).any():
            del self._samples[order.number]
            message = (
                f"its grammar has a dead end: after {sample.num_tokens} tokens of the output no token can follow, and "
                "the output is not complete. Remove rules that cannot end, and characters that no token has"
            )
            return GrammarFailure(order.number, "request", message)
        return NextMask(order.number, words, seconds)

    def _next_words(self, matcher: xgrammar.GrammarMatcher) -> bytes:
        if matcher.is_terminated():
            return b""
        matcher.fill_next_token_bitmask(self._words)
        return self._words.tobytes()


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
    # Grammar processes inherit descriptor 0 and may outlive this process. If it were the socket, an order in the queue
    # of a dead server would never be closed.
    with Path(os.devnull).open() as null:
        os.dup2(null.fileno(), 0)
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        _fork(fds[0], control, compiler, setup.budget)
        os.close(fds[0])


if __name__ == "__main__":
    main()
