"""Arguments of a call, which become one native request per prompt, and its outputs, parsed from native answers.

Errors of the call as a whole and wrong types are raised here. An error of one prompt (too long, a temperature out of
range) ends only that prompt, later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from pydantic import ConfigDict, ValidationError, field_validator

from splitserve.api import validation
from splitserve.api.prompt_tokens import chat_messages
from splitserve.api.samples import random_rid
from splitserve.api.schemas import NativeSampling
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError, SplitserveError
from splitserve.offline.terms import in_engine_terms

# Failures that a BatchError's message contains in full.
_NUM_TOLD = 5
_PROMPT_REMEDY = "give a text, token ids, or chat messages"
# A text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class SamplingParamsError(InvalidRequestError, ValueError):
    """A sampling parameter is unknown or has the wrong type."""


class SamplingParams(NativeSampling):
    """`sampling_params` of the native API with types; unknown names are errors. None: the server's default."""

    model_config = ConfigDict(extra="forbid")

    # Type checkers see the fields as its arguments.
    if not TYPE_CHECKING:

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                found = validation.field_error(error, SamplingParams, fields, "sampling_params")
                in_engine_terms(found)
                raise SamplingParamsError(found.message, param=found.param) from None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _keys_as_json_writes_them(cls, value: Any) -> Any:
        return {str(token): bias for token, bias in value.items()} if isinstance(value, Mapping) else value


Sampling = SamplingParams | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a call."""

    index: int
    rid: str
    prompt: Prompt
    sampling: SamplingParams
    # Likeliest tokens to score per token. None: no logprobs.
    num_top_logprobs: int | None
    return_hidden_states: bool = False

    def body(self, tokenizer: Tokenizer, *, stream: bool) -> dict[str, Any]:
        """Return the body for POST /generate. Raises InvalidRequestError if the prompt cannot be tokenized."""
        return {
            "rid": self.rid,
            "input_ids": _token_ids(self.prompt, tokenizer),
            "sampling_params": self.sampling.model_dump(exclude_none=True),
            "stream": stream,
            "return_logprob": self.num_top_logprobs is not None,
            "top_logprobs_num": self.num_top_logprobs or 0,
            "return_hidden_states": self.return_hidden_states,
        }


def is_single(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Return whether this is one prompt, not a list of prompts. An empty list is a list of no prompts.

    Raises TypeError for any other type.
    """
    if isinstance(prompts, bytes | Mapping) or not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):
        raise TypeError(
            f"prompts is {type(prompts).__name__}: give a text, a list of token ids or of a chat's messages, or a list "
            "of such prompts"
        )
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))


def requests_for(
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling],
    num_top_logprobs: int | None,
    *,
    hidden_states: bool = False,
) -> list[PromptRequest]:
    """Return one request per prompt. `sampling`: for all, or one per prompt. Raises InvalidRequestError."""
    is_one = is_single(prompts)
    each: list[Prompt] = [prompts] if is_one else list(prompts)  # type: ignore[arg-type,list-item]
    for i, prompt in enumerate(each):
        _check_type(prompt, "prompts" if is_one else f"prompts[{i}]")
    shared = list(sampling) if isinstance(sampling, Sequence) and not isinstance(sampling, str) else sampling
    params = [_parsed(s) for s in validation.per_prompt(shared, len(each), "sampling_params")]
    call = random_rid()
    return [PromptRequest(i, f"{call}-{i}", p, params[i], num_top_logprobs, hidden_states) for i, p in enumerate(each)]


def _parsed(sampling: Sampling) -> SamplingParams:
    if sampling is None or isinstance(sampling, Mapping):
        sampling = SamplingParams(**{str(name): value for name, value in (sampling or {}).items()})
    elif not isinstance(sampling, SamplingParams):
        sampling = validation.parse(SamplingParams, sampling, "sampling_params")
    if sampling.n not in (None, 1):
        remedy = f", and give the prompt {sampling.n} times, with a seed each" if sampling.n > 1 else ""
        raise InvalidRequestError(f"n is {sampling.n}: leave it out{remedy}", param="n")
    return sampling


def _check_type(prompt: Any, name: str) -> None:
    """Raise InvalidRequestError unless `prompt` is a text, or a list of only token ids or only messages."""
    problem = ""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        problem = f"{name} is of type {type(prompt).__name__}"
    elif not isinstance(prompt, str) and not set(map(type, prompt)) <= {int}:
        kind = Mapping if prompt and isinstance(prompt[0], Mapping) else int
        wrong = (i for i, entry in enumerate(prompt) if isinstance(entry, bool) or not isinstance(entry, kind))
        if (at := next(wrong, None)) is not None:
            problem = f"{name}[{at}] is of type {type(prompt[at]).__name__}"
    if problem:
        raise InvalidRequestError(f"{problem}: {_PROMPT_REMEDY}", param="prompts")


def _token_ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif prompt and isinstance(prompt[0], Mapping):
        ids = tokenizer.encode_chat(chat_messages(prompt))
    else:
        ids = list(prompt)
    if not ids:
        raise InvalidRequestError(f"the prompt has no tokens: {_PROMPT_REMEDY}")
    return ids


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
    # State that each token of `token_ids` was sampled from; empty unless requested.
    hidden_states: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """Parse a native answer object, finished or partial. If partial, `finish_reason` is empty."""
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        # Entries are [logprob, token id, text].
        own = meta.get("output_token_logprobs", ())
        tops = meta.get("output_top_logprobs") or [()] * len(own)
        return cls(
            text=answer["text"],
            token_ids=tuple(answer["output_ids"]),
            finish_reason="" if finish is None else finish["type"],
            logprobs=tuple(
                TokenLogprob(token_id, logprob, tuple((i, value) for value, i, _ in top))
                for (logprob, token_id, _), top in zip(own, tops, strict=True)
            ),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            hidden_states=tuple(meta.get("hidden_states", ())),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Increment of one prompt's answer."""

    text: str
    token_ids: tuple[int, ...]
    # One per token of this chunk; empty unless requested.
    logprobs: tuple[TokenLogprob, ...]
    # State that each token of this chunk was sampled from; empty unless requested.
    hidden_states: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
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
