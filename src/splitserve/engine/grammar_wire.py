"""Messages between a scheduler and its grammar processes: msgpack after a length of four bytes, network order.

That is also the framing of `multiprocessing.connection.Connection`, which the grammar process uses.
"""

from __future__ import annotations

import msgspec

from splitserve.core.grammar import GrammarBudget, GrammarKind


class GrammarSetup(msgspec.Struct, frozen=True):
    """Settings of a grammar server, as JSON in its command line."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]
    budget: GrammarBudget


class Compile(msgspec.Struct, frozen=True, tag=True):
    """The first message to a grammar process: its one grammar."""

    kind: GrammarKind
    text: str
    strict: bool


class Advance(msgspec.Struct, frozen=True, tag=True):
    """Accept tokens and return the next mask. An unknown number starts a matcher."""

    number: int
    token_ids: list[int]


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget a matcher."""

    number: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The grammar is at fault."""

    message: str


class GrammarLibraryFailure(msgspec.Struct, frozen=True, tag=True):
    """The library failed: in the compilation (-1) or in one matcher."""

    message: str
    number: int = -1


class NextMask(msgspec.Struct, frozen=True, tag=True):
    number: int
    # One bit per token, see `GrammarMatcher.fill_bitmask`. Empty: the matcher has terminated.
    words: bytes
    # CPU time that the tokens and the mask needed.
    seconds: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The grammar does not allow the token at `index` of the last Advance."""

    number: int
    index: int


class OverBudget(msgspec.Struct, frozen=True, tag=True):
    """The matcher is dropped."""

    number: int
    message: str


ToGrammar = Compile | Advance | Drop
FromGrammar = Compiled | Rejected | GrammarLibraryFailure | NextMask | Refused | OverBudget
