"""What a request's output must look like, and the contract of what holds it to that.

1. The front end makes a GrammarSpec of what the client sent: a JSON schema, a regex, an EBNF, or text with tags in it.
2. A GrammarCompiler turns it into a CompiledGrammar for one vocabulary. That may take seconds: never in the
   scheduler's thread.
3. Each sample gets a GrammarMatcher of its own, which knows where in the grammar its output stands. The engine asks it
   which tokens may come next; `Request.append` tells it which one came.

Knows no library: `splitserve.engine.grammar_host` has the implementation in processes of its own, over the one of
`splitserve.engine.grammar`, which calls xgrammar. `splitserve.testing` has a fake.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from splitserve.errors import InvalidRequestError, SplitserveError

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


class GrammarBudget(msgspec.Struct, frozen=True):
    """What one grammar may cost a worker. Seconds are CPU time."""

    # Seconds to compile a grammar.
    compile: float = 20.0
    # Seconds per token of a request: to accept it and to compute the mask of the next one.
    step: float = 0.25
    # Seconds of all tokens of a request.
    request: float = 10.0
    # Bytes of memory of a compiled grammar and its matchers.
    memory: int = 1 << 30


class GrammarMatcher(Protocol):
    """How far one sample's output has come in its grammar.

    Owned by its request and changed in the scheduler's thread only; the engine reads it while a step runs. The mask of
    the next token may be computed elsewhere: it follows some time after `accept`.
    """

    @property
    def failure(self) -> SplitserveError | None:
        """Why there will be no further mask. None: there will be."""
        ...

    def is_ready(self, *, soon: bool = False) -> bool:
        """Whether the next mask is there. `soon`: or is expected before a step ends that begins now."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False, moving nowhere, if the grammar does not allow it here."""
        ...

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        """Write which tokens may come next: bit t % 32 of the t // 32-th int32 is token t's. Not once terminated.

        At least one bit is set: where the grammar is complete, those of the end-of-sequence tokens. False, writing
        nothing, if the mask is not ready within `timeout` seconds.
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

    @property
    def is_usable(self) -> bool:
        """False: no matcher of it will ever be ready. Compile it again."""
        ...

    def matcher(self, output_ids: Sequence[int] = ()) -> GrammarMatcher:
        """Return a new one that has accepted `output_ids`, or fails because it refuses one of them. Cheap."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Called from several threads at a time. Raises InvalidRequestError where the spec is at fault."""
        ...


def refused_output(token_id: int, index: int) -> InvalidRequestError:
    """Return the error of output that came with a request and that its grammar does not allow."""
    return InvalidRequestError(f"its grammar does not allow token {token_id}, given as output position {index}")
