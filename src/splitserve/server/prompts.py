"""Checks and sampling parameters of a prompt, for both APIs, before it becomes samples."""

from __future__ import annotations

from splitserve.api import validation
from splitserve.api.fanout import PromptSpec
from splitserve.api.schemas import BootstrapFields, SamplingFields
from splitserve.core.grammar import GrammarSpec
from splitserve.core.request import BootstrapInfo, DisaggregationMode
from splitserve.server.bootstrap_fields import bootstrap_infos
from splitserve.server.front_end import FrontEnd


def bootstraps_of(front: FrontEnd, fields: BootstrapFields, num_prompts: int, n: int) -> list[BootstrapInfo | None]:
    """Return one BootstrapInfo per sample. Raises MissingBootstrapError, InvalidRequestError."""
    return bootstrap_infos(
        fields,
        mode=front.mode,
        num_prompts=num_prompts,
        n=n,
        own_host=front.config.disaggregation.host,
        own_port=front.bootstrap_port,
        own_dp_size=front.config.dp_size,
    )


def prompt_spec(
    front: FrontEnd,
    token_ids: list[int],
    fields: SamplingFields,
    *,
    name: str,
    max_new: int | None,
    min_new: int | None,
    seed: int,
    return_logprob: bool,
    num_top_logprobs: int,
    logprob_start_len: int,
    top_name: str,
    grammar: GrammarSpec | None,
) -> PromptSpec:
    """Return the spec of a prompt.

    `name`, `top_name`: names of fields for errors. `max_new` None: up to the context length.
    """
    info = front.info
    limit = info.max_total_tokens_per_request
    validation.check_prompt(token_ids, name=name, vocab_size=info.vocab_size, limit=limit)
    validation.check_top_logprobs(num_top_logprobs, top_name)
    start = validation.logprob_start(logprob_start_len, len(token_ids))
    params = validation.sampling_params(
        fields,
        max_new=max_new,
        min_new=min_new,
        seed=seed,
        grammar=grammar,
        room=limit - len(token_ids),
        vocab_size=info.vocab_size,
    )
    return PromptSpec(
        token_ids,
        params,
        return_logprob=return_logprob,
        num_top_logprobs=num_top_logprobs,
        # Only the worker that computes the prompt can score it.
        logprob_start=None if front.mode is DisaggregationMode.DECODE else start,
    )
