"""What a call gives back, read from the native answers that a front end and a router both give; and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from splitserve.core.batch import TokenLogprob
from splitserve.errors import (
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

# Failures that a BatchError's message tells in full.
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
    """One prompt's answer."""

    text: str
    # Generated tokens, the stop token included.
    token_ids: tuple[int, ...]
    # "stop": the model, a stop string or a complete grammar ended it. "length": max_new_tokens or the context did.
    finish_reason: str
    # One a token of `token_ids`; empty unless asked for.
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    # Of these, tokens whose KV was found in the prefix cache.
    cached_tokens: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From a native answer object, finished or so far; so far, `finish_reason` is empty."""
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
    """What one prompt's answer has grown by."""

    text: str
    token_ids: tuple[int, ...]
    # One a token of this chunk; empty unless asked for.
    logprobs: tuple[TokenLogprob, ...]
    # Which of the prompts.
    index: int = 0
    # With the prompt's last chunk: the whole answer.
    output: Output | None = None


class BatchError(SplitserveError):
    """Some prompts of a list failed. Raised when all have ended, so nothing of the others is lost."""

    reason = "batch_failed"

    def __init__(self, outputs: Sequence[Output | None], errors: Mapping[int, SplitserveError]) -> None:
        told = [f"prompt {i}: {errors[i].message}" for i in sorted(errors)[:_NUM_TOLD]]
        if len(errors) > _NUM_TOLD:
            told.append(f"and {len(errors) - _NUM_TOLD} more")
        super().__init__(
            f"{len(errors)} of {len(outputs)} prompts failed ({'; '.join(told)}): "
            "the answers of the others are in this error's `outputs`, every failure in its `errors`"
        )
        # In the order of the prompts; None for those that failed.
        self.outputs = list(outputs)
        # Index of the prompt -> what ended it.
        self.errors = dict(errors)


def named_error(message: str, reason: str, status: int | None = None, param: str | None = None) -> SplitserveError:
    """The error of our tree that has this reason code, whichever process it happened in. `status` None: the usual."""
    error = _BY_REASON.get(reason, SplitserveError)(message, param=param)
    error.reason, error.http_status = reason, error.http_status if status is None else status
    return error


def _logprobs(meta: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """Entries are [logprob, token id, text]."""
    own = meta.get("output_token_logprobs", ())
    tops = meta.get("output_top_logprobs") or [()] * len(own)
    return tuple(
        TokenLogprob(token_id, logprob, tuple((i, value) for value, i, _ in top))
        for (logprob, token_id, _), top in zip(own, tops, strict=True)
    )
