"""Outputs of a call, parsed from the native answers of a front end or a router, and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    EngineError,
    GrammarError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
    SplitserveError,
    WorkerUnavailableError,
)

# Failures that a BatchError's message contains in full.
_NUM_TOLD = 5
_BY_REASON: dict[str, type[SplitserveError]] = {
    kind.reason: kind
    for kind in (
        InvalidRequestError,
        PromptTooLongError,
        RequestAbortedError,
        CapacityError,
        WorkerUnavailableError,
        DeadlineExceededError,
        EngineError,
        GrammarError,
    )
}


@dataclass(frozen=True, slots=True)
class Output:
    """Answer to one prompt."""

    text: str
    # Generated tokens, the stop token included.
    token_ids: tuple[int, ...]
    # "stop": ended by the model, a stop string or a complete grammar. "length": by max_new_tokens or the context
    # length.
    finish_reason: str
    # One per token of `token_ids`; empty unless requested.
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    # Prompt tokens with KV found in the prefix cache.
    cached_tokens: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """Parse a native answer object, finished or partial. If partial, `finish_reason` is empty."""
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        return cls(
            text=answer["text"],
            token_ids=tuple(answer["output_ids"]),
            finish_reason="" if finish is None else finish["type"],
            logprobs=_logprobs(meta),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Increment of one prompt's answer."""

    text: str
    token_ids: tuple[int, ...]
    # One per token of this chunk; empty unless requested.
    logprobs: tuple[TokenLogprob, ...]
    # Index of the prompt.
    index: int = 0
    # Whole answer, with the prompt's last chunk only.
    output: Output | None = None


class BatchError(SplitserveError):
    """Failure of some prompts of a list. Raised when all have ended, so that the other outputs are not lost."""

    reason = "batch_failed"

    def __init__(self, outputs: Sequence[Output | None], errors: Mapping[int, SplitserveError]) -> None:
        told = [f"prompt {i}: {errors[i].message}" for i in sorted(errors)[:_NUM_TOLD]]
        if len(errors) > _NUM_TOLD:
            told.append(f"and {len(errors) - _NUM_TOLD} more")
        super().__init__(
            f"{len(errors)} of {len(outputs)} prompts failed ({'; '.join(told)}): "
            "the answers of the others are in this error's `outputs`, every failure in its `errors`"
        )
        # Outputs in the order of the prompts. None: the prompt failed.
        self.outputs = list(outputs)
        # Index of the prompt -> error that ended it.
        self.errors = dict(errors)


def named_error(message: str, reason: str, status: int | None = None, param: str | None = None) -> SplitserveError:
    """Return the error of our class with this reason code, from any process. `status` None: the class's default."""
    error = _BY_REASON.get(reason, SplitserveError)(message, param=param)
    error.reason, error.http_status = reason, error.http_status if status is None else status
    return error


def _logprobs(meta: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """Parse the logprobs. Entries are [logprob, token id, text]."""
    own = meta.get("output_token_logprobs", ())
    tops = meta.get("output_top_logprobs") or [()] * len(own)
    return tuple(
        TokenLogprob(token_id, logprob, tuple((i, value) for value, i, _ in top))
        for (logprob, token_id, _), top in zip(own, tops, strict=True)
    )
