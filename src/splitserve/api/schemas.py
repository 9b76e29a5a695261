"""Request bodies as pydantic models: names and types only; ranges are checked in `validation`.

Types are strict (no "10" for 10), unknown keys are ignored unless a body forbids them, null means absent. Keys that
only another role or mode needs stay unchecked here (`bootstrap_*`), so that they cannot fail a request that does not
use them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, PlainValidator, SkipValidation, WithJsonSchema

from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import clause
from splitserve.core.request import FinishReason

# Request header with the worker role that the request is for.
ROLE_HEADER = "x-splitserve-role"
# Response header of a stream that has a journal.
JOURNAL_HEADER = "x-splitserve-journal"
# Prefix of the comment with the JSON of a WorkerTrace, in a stream or after a whole answer.
TRACE_COMMENT = b":trace "
# Output tokens if the client sets no limit.
_DEFAULT_NATIVE_TOKENS = 128
_DEFAULT_COMPLETION_TOKENS = 16
# Fields for media of SGLang's and vLLM's clients. `check_fields` rejects media in them.
MEDIA_FIELDS = ("image_data", "video_data", "audio_data", "modalities", "multi_modal_data")
# Fields that change nothing in the output: those of the OpenAI API, and those that SGLang's router always adds.
WITHOUT_EFFECT = frozenset(
    {
        *MEDIA_FIELDS,
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "extra_body"),
        *("log_metrics", "separate_reasoning", "stream_reasoning"),
    }
)
# Fields that SGLang's router adds with the value false, without an effect only then.
WITHOUT_EFFECT_IF_FALSE = frozenset({"background", "no_logs", "return_bytes", "return_entropy"})


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class RoleBody(RequestModel):
    """Body of POST /role."""

    role: str
    # "complete": running requests finish here first. "migrate": they are ended, and a router continues them elsewhere.
    drain: str = "complete"
    # Timeout of the whole switch, seconds.
    timeout: float = 60.0
    # On prefill workers: port of the bootstrap server.
    bootstrap_port: int | None = None


class _ExactBody(RequestModel):
    """A body without unknown fields: a misspelt one would release all memory, or not end running requests."""

    model_config = ConfigDict(extra="forbid")


class ResumeBody(_ExactBody):
    """Body of POST /resume_memory_occupation."""

    # Parts of the memory: kv_cache, weights. None: all.
    tags: list[str] | None = None


class ChangeBody(_ExactBody):
    """Fields of changes for which the worker must be idle."""

    # End running requests, or wait for their ends. Neither: they block the change.
    abort: bool = False
    drain: bool = False
    # Seconds until the worker must be idle.
    timeout: float = 60.0


class MemoryBody(ResumeBody, ChangeBody):
    """Body of POST /release_memory_occupation."""


class WeightsBody(ChangeBody):
    """Body of POST /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    # Name of `abort` in SGLang.
    abort_all_requests: bool = False
    flush_cache: bool | None = None
    # SGLang's fields without an effect here.
    weight_version: str | None = None
    torch_empty_cache: bool | None = None
    token_step: int | None = None


class SharedWeightsBody(ChangeBody):
    """Body of POST /update_weights_from_shared_memory."""

    # Name of a safetensors file in /dev/shm.
    name: str


class SamplingFields(RequestModel):
    """Sampling fields with equal names in both APIs. None: the default of core.sampling.SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    # Keys: token ids, as strings because JSON requires it.
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # Keep the matched stop string in the text (two names for one option).
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    # Grammar of the output. At most one of these fields may be set; `grammars` checks them.
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    seed: int | None = None
    sampling_seed: int | None = None

    def output_bounds(self) -> tuple[int | None, int | None]:
        """Return the greatest and the least number of output tokens. None: up to the context length, and 0."""
        raise NotImplementedError

    def own_names(self) -> dict[str, str]:
        """Return this body's names of parameters that SamplingParams names differently, for errors about them."""
        return {}


class NativeSampling(SamplingFields):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None

    def output_bounds(self) -> tuple[int | None, int | None]:
        return _DEFAULT_NATIVE_TOKENS if self.max_new_tokens is None else self.max_new_tokens, self.min_new_tokens


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal (`samples.py`): content of the preceding events, for one sample."""

    # Index of the sample over the whole request.
    index: int
    token_ids: list[int] = []
    # Logprobs of these tokens, if requested.
    logprobs: list[TokenLogprob] = []
    num_cached_tokens: int = 0
    # Only in the first line of a sample.
    num_prompt_tokens: int = 0
    finish: FinishReason | None = None
    # Only in the first line: fingerprint of the model. Empty: unknown.
    model: str = ""


class Dispatch(msgspec.Struct, frozen=True):
    """One attempt of a request (`samples.py`)."""

    # Number of the attempt, from 0. A worker replaces it by one that no other attempt has there.
    attempt: int = 0
    # Time at which the client's request reached the router, seconds since 1970; seconds from then to this attempt.
    created: int | None = None
    elapsed: float = 0.0
    # Whether to write a journal if the answer is streamed.
    journal: bool = False
    # Whether to send the spans of the request with the end of the answer (`core/timeline.py`), as a comment.
    report: bool = False
    # Trace of the request, 32 hexadecimal digits. Empty: unknown.
    trace_id: str = ""
    # Whether the router has drawn the seed of the body. Then each prompt gets its own, as without a router.
    has_drawn_seed: bool = False
    # Lines of earlier attempts, in order.
    told: list[JournalEntry] = []
    # Whether the router probes the worker: the request passes those of clients.
    probe: bool = False


def _dispatch(value: object) -> Dispatch | None:
    try:
        return msgspec.convert(value, Dispatch | None)
    except msgspec.ValidationError as error:
        raise ValueError(f"{clause(error)}: it is for routers, leave it out") from None


class GenerationFields(RequestModel):
    """Fields of all routes that generate."""

    rid: str | list[str] | None = None
    stream: bool | None = None
    # Priority, and timeout in seconds, of every sample (`samples.py`).
    priority: int | None = None
    timeout: float | None = None
    # A router adds the others. `bootstrap_*`: a value for all samples, or a list with one per prompt or one per sample.
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    # Rank of the prefill worker.
    data_parallel_rank: Any = None
    # Whether a decode worker computes the prompt itself. Without a room there is no prefill worker.
    local_prefill: bool | None = None
    dispatch: Annotated[Dispatch | None, PlainValidator(_dispatch), WithJsonSchema({"type": ["object", "null"]})] = None


class GenerateBody(GenerationFields):
    """Body of POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    # One NativeSampling for all prompts, or a list with one per prompt.
    sampling_params: SkipValidation[NativeSampling | list[NativeSampling | None] | None] = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    # Whether to return the hidden state that each token was sampled from.
    return_hidden_states: bool | list[bool] | None = None
    # Whether the logprob entries contain each token's text.
    return_text_in_logprobs: bool | None = None


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(SamplingFields, GenerationFields):
    """Fields that completions and chat completions share, extensions included."""

    model: str | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    # Add `token_ids` to the choices and `prompt_token_ids` to the answer.
    return_token_ids: bool | None = None
    # Add `hidden_states` to the choices: the state that each token was sampled from.
    return_hidden_states: bool | None = None

    def output_bounds(self) -> tuple[int | None, int | None]:
        return self.max_tokens, self.min_tokens

    def own_names(self) -> dict[str, str]:
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class CompletionBody(OpenAIBody):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    # Alternatives per token; 0: only the tokens' own logprobs.
    logprobs: int | None = None

    @property
    def has_no_output(self) -> bool:
        """Return whether only the prompt is wanted, for example with its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    def output_bounds(self) -> tuple[int | None, int | None]:
        if self.has_no_output:
            # The prompt is computed to sample a token, which the answer leaves out.
            return 1, None
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.min_tokens


class ChatBody(OpenAIBody):
    """Body of POST /v1/chat/completions."""

    # `prompt_tokens.chat_messages` checks them.
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # `tools` checks these.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def output_bounds(self) -> tuple[int | None, int | None]:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens, self.min_tokens

    def own_names(self) -> dict[str, str]:
        has_new_name = self.max_completion_tokens is not None
        return super().own_names() | ({"max_new_tokens": "max_completion_tokens"} if has_new_name else {})


class AbortBody(RequestModel):
    rid: str | None = None
    abort_all: bool | None = None


class TokenizeBody(RequestModel):
    """Body of POST /tokenize, with `prompt` or `messages`."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(RequestModel):
    model: str | None = None
    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool | None = None
