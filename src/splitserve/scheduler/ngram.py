"""Prompt lookup: tokens that followed an earlier occurrence of the last tokens are the proposals.

1. The longest suffix of the text, of `MIN_MATCH` to `max_match` tokens, that also occurs earlier is looked up. Of
   several occurrences the latest counts.
2. The tokens behind it are the proposals. If they reach the end of the text, they are repeated: a text that repeats
   itself is expected to continue so.

A lookup is a few passes over the text at memory speed. Texts, four bytes per token, are kept only for the requests of
the last call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitserve.core.batch import RequestStep, SampleSpec

# A match of a single token is too often accidental.
MIN_MATCH = 2


class Text:
    """The tokens of a request. They only grow."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self._tokens: npt.NDArray[np.int32] = np.array(prompt_ids, dtype=np.int32)
        self._length = len(prompt_ids)

    def follow(self, output_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Append new output tokens and return all tokens. A view, valid until the next call."""
        length = len(self.prompt_ids) + len(output_ids)
        if length > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * length)
        self._tokens[self._length : length] = output_ids[self._length - len(self.prompt_ids) :]
        self._length = length
        return self._tokens[:length]


class NgramProposer:
    """A Proposer by prompt lookup."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        # rid -> text of the request.
        self._texts: dict[str, Text] = {}

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        texts: dict[str, Text] = {}
        guesses = []
        for step, room in zip(steps, rooms, strict=True):
            spec = step.sample
            assert spec is not None
            texts[step.rid] = text = self._text(step.rid, spec)
            guesses.append(continuation(text.follow(spec.output_ids), self._max_match, room))
        self._texts = texts
        return guesses

    def _text(self, rid: str, spec: SampleSpec) -> Text:
        text = self._texts.get(rid)
        # Another request may reuse an id.
        return text if text is not None and text.prompt_ids is spec.prompt_ids else Text(spec.prompt_ids)


def continuation(tokens: npt.NDArray[np.int32], max_match: int, count: int) -> list[int]:
    """Return `count` tokens that may follow, or none if the last `MIN_MATCH` tokens did not occur before."""
    last = len(tokens) - 1
    # Positions before the last token at which the suffix of the current length ends.
    places = np.flatnonzero(tokens[:-1] == tokens[last])
    found = places[:0]
    for back in range(1, max_match):
        places = places[places >= back]
        places = places[tokens[places - back] == tokens[last - back]]
        if not len(places):
            break
        if back + 1 >= MIN_MATCH:
            found = places
    if not len(found):
        return []
    behind = tokens[found[-1] + 1 : found[-1] + 1 + count]
    return [int(token) for token in np.resize(behind, count)]
