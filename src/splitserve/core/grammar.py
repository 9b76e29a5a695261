"""Constraints on the output of requests, and the interfaces of their implementation.

1. The front end builds a GrammarSpec from the request: a JSON schema, a regex, an EBNF, or text with tags in it.
2. A GrammarCompiler turns it into a CompiledGrammar for one vocabulary. That may take seconds: never in the
   scheduler's thread.
3. Each sample gets its own GrammarMatcher, which stores the position of the output in the grammar. The engine reads
   the allowed next tokens from it; `Request.append` advances it by the sampled token.

This module uses no library. `splitserve.engine.grammar_host` has the implementation in separate processes. These
use that of `splitserve.engine.grammar_process`, which calls xgrammar. `tests/support` has a fake.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from splitserve.core.errors import InvalidRequestError, SplitserveError

# Maximum whitespace between two parts of a JSON text, because small models would never end it. Enough for seven levels.
MAX_JSON_WHITESPACE = 16


class GrammarKind(enum.StrEnum):
    """The language `GrammarSpec.text` is written in. The names are those of the sampling parameters."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # GBNF with a first rule named `root`.
    EBNF = "ebnf"
    # Free text in which tags begin and end a grammar: tool calls. JSON, in xgrammar's format.
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as the client sent it. Equal specs compile to the same grammar, so it is the key of the cache."""

    kind: GrammarKind
    text: str
    # JSON schemas: objects and arrays contain only what the schema names, even if JSON schema would allow more.
    strict: bool = True


class GrammarBudget(msgspec.Struct, frozen=True):
    """Limits of one grammar on a worker. Seconds are CPU time."""

    # Seconds to compile a grammar.
    compile: float = 20.0
    # Seconds per token of a request: to accept the token and to compute the mask of the next one.
    step: float = 0.25
    # Seconds for all tokens of a request.
    request: float = 10.0
    # Bytes of memory for a compiled grammar and its matchers.
    memory: int = 1 << 30


class GrammarMatcher(Protocol):
    """Position of one sample's output in its grammar.

    Owned by its request and changed in the scheduler's thread only; the engine reads it while a step runs. The mask of
    the next token may be computed elsewhere, and is then ready some time after `accept`.
    """

    @property
    def failure(self) -> SplitserveError | None:
        """Error after which there are no further masks. None: no error."""
        ...

    def is_ready(self, *, soon: bool = False) -> bool:
        """Return whether the next mask is ready. `soon`: or is expected before the end of a step that begins now."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by one token. Return False, without a change, if the grammar does not allow the token here."""
        ...

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        """Write the allowed next tokens: bit t % 32 of the t // 32-th int32 is token t's. Not once terminated.

        At least one bit is set: if the grammar is complete, those of the end-of-sequence tokens. Return False, and
        write nothing, if the mask is not ready within `timeout` seconds.
        """
        ...

    def is_terminated(self) -> bool:
        """Return whether the grammar is complete and its end was accepted: no token may follow."""
        ...


class CompiledGrammar(Protocol):
    @property
    def num_bytes(self) -> int:
        """Approximate memory it takes."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether new matchers can become ready. If not, compile the grammar again."""
        ...

    def matcher(self, output_ids: Sequence[int] = ()) -> GrammarMatcher:
        """Return a new matcher that has accepted `output_ids`, or has failed because it rejects one of them. Cheap."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar; several threads may call it at once. Raises InvalidRequestError if the spec is wrong."""
        ...


def refused_output(token_id: int, index: int) -> InvalidRequestError:
    """Return the error for output that was sent with a request and violates its grammar."""
    return InvalidRequestError(f"its grammar does not allow token {token_id}, given as output position {index}")
