"""Masks of the tokens that the grammars of a step's rows allow.

Grammar processes compute masks while the model runs (`grammar_link.py`). `StepMasks.rows` collects them after the
forward pass. A row without a mask after a few milliseconds is not sampled in this step, so no other row waits for it.
`forbid` then sets the logits of all tokens that a mask excludes to minus infinity.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.batch import SampleSpec
from splitserve.engine.inputs import to_device

# [rows, words]: bit t % 32 of word t // 32 is set if token t is allowed. Rows without a grammar are undefined.
Bitmask = npt.NDArray[np.int32]

# Seconds that all rows of a step together wait for masks after the forward pass.
_MASK_TIMEOUT = 0.005
# The error of a row that is not sampled because its mask is not ready.
NOT_READY = "not ready"


class StepMasks:
    """The masks of one step's rows, collected when they are needed."""

    def __init__(self, collector: MaskCollector, specs: Sequence[SampleSpec]) -> None:
        self._collector = collector
        self.specs = specs
        self._has_grammar = any(spec.grammar is not None for spec in specs)
        self._deadline: float | None = None
        self._errors: dict[int, str] = {}

    def rows(self, part: slice) -> Bitmask | None:
        """Return the masks of a part of the rows; None if no row of the step has a grammar."""
        if not self._has_grammar:
            return None
        if self._deadline is None:
            self._deadline = time.monotonic() + _MASK_TIMEOUT
        specs = self.specs[part]
        bitmask = np.empty((len(specs), len(self._collector.vocabulary)), dtype=np.int32)
        for number, spec in enumerate(specs):
            if spec.grammar is not None and (error := self._collector.fill(spec, bitmask[number], self._deadline)):
                self._errors[part.start + number] = error
        return bitmask

    def error(self, row: int) -> str:
        """Return why a row of an earlier call of `rows` has no mask. NOT_READY: not yet. Empty: it has a mask."""
        return self._errors.get(row, "")


class MaskCollector:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        # One bit per token; those beyond the vocabulary, which a library may set, are 0.
        bits = np.arange(-(-vocab_size // 32) * 32) < vocab_size
        self.vocabulary: Bitmask = np.packbits(bits, bitorder="little").view(np.int32)
        self._eos_token_ids = eos_token_ids

    def fill(self, spec: SampleSpec, row: Bitmask, deadline: float) -> str:
        """Write the mask of one row. Return an error, with all tokens in the row, if there is none by `deadline`."""
        assert spec.grammar is not None
        try:
            if spec.grammar.fill_bitmask(row.data, max(0.0, deadline - time.monotonic())):
                self._exclude_ending(spec, row)
                return ""
            error = NOT_READY
        except Exception as failure:
            error = f"its grammar failed: {type(failure).__name__}: {failure}"
        row[:] = self.vocabulary
        return error

    def _exclude_ending(self, spec: SampleSpec, row: Bitmask) -> None:
        """Exclude the tokens that must not end this row's output now, if other tokens are allowed.

        If none is, a complete grammar ends anyway.
        """
        params = spec.params
        is_short = len(spec.output_ids) < params.min_new_tokens
        ending = set(params.stop_token_ids) if is_short else set()
        if is_short or params.ignore_eos:
            ending |= self._eos_token_ids
        if ending:
            others = row & self.vocabulary
            tokens = np.array(sorted(ending))
            np.bitwise_and.at(others, tokens // 32, ~(np.int32(1) << (tokens % 32).astype(np.int32)))
            if others.any():
                row[:] = others


def forbid(logits: torch.Tensor, specs: Sequence[SampleSpec], bitmask: Bitmask) -> torch.Tensor:
    """Return logits [n, vocab_size] with all but the allowed tokens at -inf, in the rows that have a grammar.

    The input is unchanged.
    """
    # Imported here, because the import takes longer than most commands run.
    import xgrammar

    rows = [i for i, spec in enumerate(specs) if spec.grammar is not None]
    vocab_size = logits.shape[-1]
    # Whole words: for a row that allows all of a number of tokens that is no multiple of 32, xgrammar 0.2 writes one
    # element behind the row.
    padded = logits.new_empty(len(logits), bitmask.shape[-1] * 32)
    padded[:, :vocab_size] = logits
    allowed = to_device(bitmask, logits.device)
    xgrammar.apply_token_bitmask_inplace(padded, allowed, vocab_size=padded.shape[-1], indices=rows)
    return padded[:, :vocab_size]
