"""Grammars of the real library in this process: masks are computed when they are read, so they are always ready."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.core.errors import SplitserveError
from splitserve.core.grammar import GrammarSpec, refused_output
from splitserve.engine.grammar_process import XGrammar, XGrammarCompiler, XGrammarMatcher


class LocalCompiler:
    """GrammarCompiler that compiles in the calling thread."""

    def __init__(self, compiler: XGrammarCompiler) -> None:
        self._compiler = compiler

    def compile(self, spec: GrammarSpec) -> LocalGrammar:
        return LocalGrammar(self._compiler.compile(spec))


class LocalGrammar:
    """CompiledGrammar with matchers in this process."""

    is_usable = True

    def __init__(self, grammar: XGrammar) -> None:
        self._grammar = grammar
        self.num_bytes = grammar.num_bytes

    def matcher(self, output_ids: Sequence[int] = ()) -> LocalMatcher:
        return LocalMatcher(self._grammar.matcher(), output_ids)


class LocalMatcher:
    """GrammarMatcher that computes masks on request."""

    def __init__(self, matcher: XGrammarMatcher, output_ids: Sequence[int]) -> None:
        self.failure: SplitserveError | None = None
        self.accept = matcher.accept
        self.is_terminated = matcher.is_terminated
        self._fill = matcher.fill_bitmask
        for index, token_id in enumerate(output_ids):
            if not matcher.accept(token_id):
                self.failure = refused_output(token_id, index)
                break

    def is_ready(self, *, soon: bool = False) -> bool:
        return True

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        self._fill(words)
        return True
