"""Conversion of a call's arguments to one native request per prompt. Errors of the call as a whole are raised here.

An error of one prompt (too long, a temperature out of range) ends only that prompt, later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from pydantic import ConfigDict, field_validator

from splitserve.api import validation
from splitserve.api.prompt_tokens import chat_messages
from splitserve.api.samples import random_rid
from splitserve.api.schemas import NativeSampling
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.errors import InvalidRequestError

# A text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class SamplingParams(NativeSampling):
    """`sampling_params` of the native API with types; unknown names are errors. None: the server's default."""

    model_config = ConfigDict(extra="forbid")

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

    def body(self, tokenizer: Tokenizer, *, stream: bool) -> dict[str, Any]:
        """Return the body for POST /generate. Raises InvalidRequestError if the prompt cannot be tokenized."""
        return {
            "rid": self.rid,
            "input_ids": _token_ids(self.prompt, tokenizer),
            "sampling_params": self.sampling.model_dump(exclude_none=True),
            "stream": stream,
            "return_logprob": self.num_top_logprobs is not None,
            "top_logprobs_num": self.num_top_logprobs or 0,
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
    prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling], num_top_logprobs: int | None
) -> list[PromptRequest]:
    """Return one request per prompt. `sampling`: for all, or one per prompt. Raises InvalidRequestError."""
    each: list[Prompt] = [prompts] if is_single(prompts) else list(prompts)  # type: ignore[arg-type]
    shared = list(sampling) if isinstance(sampling, Sequence) else sampling
    params = [_parsed(s) for s in validation.per_prompt(shared, len(each), "sampling_params")]
    call = random_rid()
    return [PromptRequest(i, f"{call}-{i}", p, params[i], num_top_logprobs) for i, p in enumerate(each)]


def _parsed(sampling: Sampling) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        sampling = validation.parse(SamplingParams, {} if sampling is None else sampling)
    if sampling.n not in (None, 1):
        raise InvalidRequestError(
            f"n is {sampling.n}: give the prompt {sampling.n} times instead, with a seed each", param="n"
        )
    return sampling


def _token_ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return tokenizer.encode_chat(chat_messages(prompt))
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(f"a prompt is a {type(prompt).__name__}: give a text, token ids, or chat messages")
    return list(prompt)
