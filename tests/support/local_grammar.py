"""Grammars of the real library in this process: masks are computed when they are read, so they are always ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from splitserve.core.errors import SplitserveError
from splitserve.core.grammar import GrammarSpec, refused_output
from splitserve.engine.grammar_process import XGrammar, XGrammarCompiler

if TYPE_CHECKING:
    import xgrammar


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

    def __init__(self, matcher: xgrammar.GrammarMatcher, output_ids: Sequence[int]) -> None:
        self.failure: SplitserveError | None = None
        self.is_terminated = matcher.is_terminated
        self._matcher = matcher
        for index, token_id in enumerate(output_ids):
            if not self.accept(token_id):
                self.failure = refused_output(token_id, index)
                break

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def is_ready(self, *, soon: bool = False) -> bool:
        return True

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        self._matcher.fill_next_token_bitmask(np.frombuffer(words, dtype=np.int32))
        return True
