"""The bodies clients send, as pydantic models: names and types only, the ranges are checked in `validation`.

Types are strict (no "10" for 10), unknown keys are ignored, null means absent. Keys that only another role or mode
needs stay unchecked here (`bootstrap_*`), so that they cannot fail a request they do not concern.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, PlainValidator, SkipValidation, WithJsonSchema

from splitserve.errors import clause
from splitserve.server.dispatch import Dispatch


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class RoleBody(Body):
    """Of POST /role."""

    role: str
    # "complete": what runs ends here first. "migrate": it is broken off, and a router goes on with it elsewhere.
    drain: str = "complete"
    # Seconds for all of it.
    timeout: float = 60.0
    # Prefill: of its bootstrap server.
    bootstrap_port: int | None = None


class SamplingFields(Body):
    """What both APIs call by the same name. None: the default of core.sampling.SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    # Token id, as JSON writes keys: a string.
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # Keep the matched stop string in the text (two names for one thing).
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    # What the output must look like, one of these at most; `grammars` looks into them.
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    seed: int | None = None
    sampling_seed: int | None = None

    def own_names(self) -> dict[str, str]:
        """What this body calls parameters that SamplingParams calls otherwise, for errors about them."""
        return {}


class NativeSampling(SamplingFields):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None


def _dispatch(value: object) -> Dispatch | None:
    try:
        return msgspec.convert(value, Dispatch | None)
    except msgspec.ValidationError as error:
        raise ValueError(f"{clause(error)}: it is for routers, leave it out") from None


class DispatchFields(Body):
    dispatch: Annotated[Dispatch | None, PlainValidator(_dispatch), WithJsonSchema({"type": ["object", "null"]})] = None


class PatienceFields(Body):
    """How the request stands in line (`patience.py`)."""

    priority: int | None = None
    # Seconds.
    timeout: float | None = None


class BootstrapFields(Body):
    """What a router adds: a value for all samples, or a list with one a prompt or one a sample."""

    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    # Of the prefill worker.
    data_parallel_rank: Any = None
    # A decode worker is to compute the prompt itself: without a room there is nobody else.
    local_prefill: bool | None = None


class GenerateBody(BootstrapFields, PatienceFields, DispatchFields):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    # One NativeSampling for all prompts, or a list with one a prompt.
    sampling_params: SkipValidation[NativeSampling | list[NativeSampling | None] | None] = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    # Put each token's text into the logprob entries.
    return_text_in_logprobs: bool | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(SamplingFields, BootstrapFields, PatienceFields, DispatchFields):
    """What completions and chat completions share, extensions included."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    rid: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    # Add `token_ids` to the choices and `prompt_token_ids` to the answer.
    return_token_ids: bool | None = None

    def own_names(self) -> dict[str, str]:
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    # Alternatives beside each token; 0: only the tokens' own logprobs.
    logprobs: int | None = None


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    # `validation.chat_messages` looks into them.
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # `tools` looks into these.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def own_names(self) -> dict[str, str]:
        has_new_name = self.max_completion_tokens is not None
        return super().own_names() | ({"max_new_tokens": "max_completion_tokens"} if has_new_name else {})


class AbortBody(Body):
    rid: str | None = None
    abort_all: bool | None = None


class TokenizeBody(Body):
    """`prompt` or `messages`."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool | None = None
