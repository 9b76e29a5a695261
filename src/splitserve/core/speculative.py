"""Settings of speculative decoding."""

from __future__ import annotations

import enum

from splitserve.core.options import Config, option

# Algorithm ngram: a match of a single token is too often accidental.
MIN_NGRAM_MATCH = 2


class SpeculativeAlgorithm(enum.StrEnum):
    """Source of draft tokens.

    NGRAM is the text itself (`scheduler/speculation.py`), DRAFT a small model (`engine/draft.py`). EAGLE3 and MTP are
    heads that read hidden states of the served model (`engine/heads/`): from a checkpoint of their own, or from that
    of the model.
    """

    NGRAM = "ngram"
    DRAFT = "draft"
    EAGLE3 = "eagle3"
    MTP = "mtp"

    @property
    def is_head(self) -> bool:
        """Return whether a draft head proposes."""
        return self in (SpeculativeAlgorithm.EAGLE3, SpeculativeAlgorithm.MTP)

    @property
    def has_own_checkpoint(self) -> bool:
        """Return whether the proposer is loaded from a checkpoint beside the model's."""
        return self in (SpeculativeAlgorithm.DRAFT, SpeculativeAlgorithm.EAGLE3)


# SGLang's names of the same algorithms.
_SPELLINGS = {"ngram": "ngram", "standalone": "draft", "eagle3": "eagle3", "nextn": "mtp"}


class SpeculativeConfig(Config, frozen=True, kw_only=True):
    algorithm: SpeculativeAlgorithm | None = option(
        None,
        "Propose draft tokens and verify several per step: ngram from the text, draft by a small model, eagle3 and mtp "
        "by a head that reads the model's hidden states.",
        name="speculative_algorithm",
        aliases="--speculative-algo",
        spellings=_SPELLINGS,
    )
    num_draft_tokens: int = option(4, "Draft tokens per request and step.", name="speculative_num_draft_tokens", ge=1)
    num_steps: int | None = option(
        None,
        "draft, eagle3, mtp: tokens that the proposer generates one after the other. The smaller of this and "
        "--speculative-num-draft-tokens applies.",
        name="speculative_num_steps",
        ge=1,
    )
    ngram_max_match: int = option(
        8,
        "ngram: maximum number of last tokens to search for in the text.",
        name="speculative_ngram_max_match",
        ge=MIN_NGRAM_MATCH,
    )
    draft_model: str | None = option(
        None,
        "draft: a smaller model with the same vocabulary. eagle3: the head's checkpoint. Give it to prefill "
        "workers, too.",
        name="speculative_draft_model",
        metavar="MODEL",
        aliases="--speculative-draft-model-path",
    )

    @property
    def most_proposals(self) -> int:
        """Return the maximum number of draft tokens per request and step."""
        return min(self.num_draft_tokens, self.num_steps or self.num_draft_tokens)

    @property
    def head(self) -> SpeculativeAlgorithm | None:
        """Return the kind of draft head. None: no head proposes."""
        return self.algorithm if self.algorithm is not None and self.algorithm.is_head else None

    @property
    def has_draft_layers(self) -> bool:
        """Return whether pages of the KV pool hold layers of a draft model or head."""
        return self.draft_model is not None or self.head is not None
