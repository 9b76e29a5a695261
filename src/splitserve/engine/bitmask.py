"""Which tokens the grammars of a step's rows allow: filled while the model runs, applied before a token is drawn.

1. `BitmaskFiller.begin` starts filling, in a thread of its own: a row takes microseconds as a rule, but milliseconds
   inside a JSON string of bounded length. The matchers must not move until the step has ended.
2. The forward pass runs meanwhile; the library lets go of the interpreter while it works.
3. `forbid` sets the logits of every other token of those rows to minus infinity.

A step without a grammar starts no thread and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.batch import SampleSpec
from splitserve.core.grammar import GrammarMatcher
from splitserve.engine.upload import to_device

# [rows, words]: bit t % 32 of word t // 32 is set where token t may come. Rows without a grammar are undefined.
Bitmask = npt.NDArray[np.int32]

# Seconds the filling of one step's rows may take beyond the forward pass.
_FILL_TIMEOUT = 60.0


class FilledBitmask:
    """A bitmask that may still be in the making. Both wait until it is filled."""

    def __init__(self, future: Future[tuple[Bitmask, dict[int, str]]] | None) -> None:
        """`future`: with what went wrong in the rows where something did."""
        self._future = future

    def rows(self, part: slice) -> Bitmask | None:
        """None where no row of the step has a grammar."""
        return None if self._future is None else self._future.result(_FILL_TIMEOUT)[0][part]

    def error(self, row: int) -> str:
        """Why the row says nothing of what its grammar allows; empty: it does."""
        return "" if self._future is None else self._future.result(_FILL_TIMEOUT)[1].get(row, "")


class BitmaskFiller:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        # One bit a token; those beyond the vocabulary, which a library may set, are 0.
        bits = np.arange(-(-vocab_size // 32) * 32) < vocab_size
        self._vocabulary: Bitmask = np.packbits(bits, bitorder="little").view(np.int32)
        self._eos_token_ids = eos_token_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bitmask")

    def begin(self, specs: Sequence[SampleSpec]) -> FilledBitmask:
        if all(spec.grammar is None for spec in specs):
            return FilledBitmask(None)
        return FilledBitmask(self._thread.submit(self._fill, specs))

    def _fill(self, specs: Sequence[SampleSpec]) -> tuple[Bitmask, dict[int, str]]:
        bitmask = np.empty((len(specs), len(self._vocabulary)), dtype=np.int32)
        errors: dict[int, str] = {}
        for number, (spec, row) in enumerate(zip(specs, bitmask, strict=True)):
            if spec.grammar is None:
                continue
            try:
                self._fill_row(spec, spec.grammar, row)
            except Exception as error:
                # The library's, in this request's grammar: the others' rows are theirs.
                row[:] = self._vocabulary
                errors[number] = f"its grammar failed: {type(error).__name__}: {error}"
        return bitmask, errors

    def _fill_row(self, spec: SampleSpec, grammar: GrammarMatcher, row: Bitmask) -> None:
        grammar.fill_bitmask(row.data)
        ending = self._ending(spec)
        if ending:
            others = row & self._vocabulary
            tokens = np.array(sorted(ending))
            np.bitwise_and.at(others, tokens // 32, ~(np.int32(1) << (tokens % 32).astype(np.int32)))
            # A grammar that is complete and leaves nothing else ends all the same.
            if others.any():
                row[:] = others

    def _ending(self, spec: SampleSpec) -> set[int]:
        """Tokens that are not to end this row's output now, if it can go on."""
        params = spec.params
        is_short = len(spec.output_ids) < params.min_new_tokens
        ending = set(params.stop_token_ids) if is_short else set()
        return ending | self._eos_token_ids if is_short or params.ignore_eos else ending


def forbid(logits: torch.Tensor, specs: Sequence[SampleSpec], bitmask: Bitmask) -> torch.Tensor:
    """Logits [n, vocab_size] with all but the allowed tokens at -inf, in the rows that have a grammar.

    The input is left alone.
    """
    # Only now: importing it takes longer than most commands run.
    import xgrammar

    rows = [i for i, spec in enumerate(specs) if spec.grammar is not None]
    allowed = to_device(bitmask, logits.device)
    masked = logits.clone()
    xgrammar.apply_token_bitmask_inplace(masked, allowed, vocab_size=logits.shape[-1], indices=rows)
    return masked
