"""Grammars over xgrammar (Dong et al., arXiv:2411.15100), for one model's vocabulary.

Only grammar processes use it, because a call may need any time and memory. Special tokens have no text here, so that no
grammar can contain one; only the end-of-sequence tokens may follow a complete grammar.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import MAX_JSON_WHITESPACE, GrammarKind, GrammarSpec

if TYPE_CHECKING:
    import xgrammar

# The library's errors begin with a time and a position in its source.
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is (false|true): )?")


class XGrammarCompiler:
    """Compiler of the library. `vocab_size`: the model's, which may be padded beyond the tokenizer's. Thread-safe."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._made: xgrammar.GrammarCompiler | None = None

    def compile(self, spec: GrammarSpec) -> XGrammar:
        compiler = self._compiler()
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
        grammar.matcher().fill_bitmask(bits.data)
        first = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=self.vocab_size, bitorder="little"))
        return not set(first.tolist()) <= self._eos_token_ids

    def load(self) -> None:
        """Import the library and read the tokenizer now."""
        self._compiler()

    def _compiler(self) -> xgrammar.GrammarCompiler:
        with self._lock:
            if self._made is None:
                import xgrammar

                # One thread per grammar and no cache: the grammar queue has both.
                self._made = xgrammar.GrammarCompiler(self._vocabulary(), max_threads=1, cache_enabled=False)
            return self._made

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

    def matcher(self) -> XGrammarMatcher:
        import xgrammar

        return XGrammarMatcher(
            xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=self._ends_by_itself)
        )


class XGrammarMatcher:
    """Matcher of the library. Its calls have no time limit."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def fill_bitmask(self, words: memoryview) -> None:
        self._matcher.fill_next_token_bitmask(np.frombuffer(words, dtype=np.int32))

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of the library means that it could not allocate memory."""
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> Any:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return compiler.compile_json_schema(
                spec.text, strict_mode=spec.strict, max_whitespace_cnt=MAX_JSON_WHITESPACE
            )
        case GrammarKind.REGEX:
            return compiler.compile_regex(spec.text)
        case GrammarKind.EBNF:
            return compiler.compile_grammar(spec.text)
        case GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(spec.text)
