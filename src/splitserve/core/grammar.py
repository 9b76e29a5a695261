"""What a request's output must look like, and the contract of what holds it to that.

1. The front end makes a GrammarSpec of what the client sent: a JSON schema, a regex, an EBNF, or text with tags in it.
2. A GrammarCompiler turns it into a CompiledGrammar for one vocabulary. That may take seconds: never in the
   scheduler's thread.
3. Each sample gets a GrammarMatcher of its own, which knows where in the grammar its output stands. The engine asks it
   which tokens may come next; `Request.append` tells it which one came.

Knows no library: `splitserve.engine.grammar` has the one implementation over xgrammar, `splitserve.testing` a fake.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

# Whitespace between two parts of a JSON text at most: small models would go on for ever. Enough for seven levels.
MAX_JSON_WHITESPACE = 16


class GrammarKind(enum.StrEnum):
    """The language `GrammarSpec.text` is written in. The names are those of the sampling parameters."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # GBNF, whose first rule is called `root`.
    EBNF = "ebnf"
    # Free text in which tags open a grammar and close it again: tool calls. JSON, in xgrammar's form.
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as the client gave it. Equal specs compile to the same thing, so it is the key of the cache."""

    kind: GrammarKind
    text: str
    # JSON schemas: objects and arrays hold only what the schema names, also where JSON schema would allow more.
    strict: bool = True


class GrammarMatcher(Protocol):
    """How far one sample's output has come in its grammar.

    Owned by its request and changed in the scheduler's thread only; the engine reads it while a step runs.
    """

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False, moving nowhere, if the grammar does not allow it here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` accepted tokens back, the one that terminated it included."""
        ...

    def fork(self) -> GrammarMatcher:
        """A second matcher that stands where this one does and goes its own way."""
        ...

    def fill_bitmask(self, words: memoryview) -> None:
        """Write which tokens may come next: bit t % 32 of the t // 32-th int32 is token t's. Not once terminated.

        At least one bit is set: where the grammar is complete, those of the end-of-sequence tokens.
        """
        ...

    def is_terminated(self) -> bool:
        """The grammar is complete and its end has been accepted: nothing may follow."""
        ...


class CompiledGrammar(Protocol):
    @property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        ...

    def matcher(self) -> GrammarMatcher:
        """A new one, at the beginning. Cheap."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Called from several threads at a time. Raises InvalidRequestError where the spec is at fault."""
        ...
