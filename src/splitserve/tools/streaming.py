"""Streamed requests to a served model through the `openai` package, with the times that a user experiences."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from splitserve.tools.bench.stats import percentile


@dataclass(slots=True)
class StreamedAnswer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Seconds from sending the request to the first token.
    ttft: float = 0.0
    # Seconds between tokens. Tokens that arrived in one piece share its gap.
    gaps: list[float] = field(default_factory=list)

    @property
    def mean_itl(self) -> float:
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0

    @property
    def p99_itl(self) -> float:
        return percentile(self.gaps, 99) if self.gaps else 0.0


def api_key() -> str | None:
    """Return the API key from the environment, for servers that require one."""
    return os.environ.get("SPLITSERVE_API_KEY")


def open_client(url: str, timeout: float = 600.0) -> OpenAI:
    """Return a client of a router or worker at `url`, with or without /v1. Uses the API key from the environment."""
    key = api_key() or "none"
    return OpenAI(base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key=key, timeout=timeout, max_retries=0)


def stream_chat(
    client: OpenAI,
    model: str,
    messages: list[ChatCompletionMessageParam],
    *,
    max_tokens: int,
    temperature: float,
    on_text: Callable[[str], None],
) -> StreamedAnswer:
    """Run one turn. `on_text` receives each piece as it arrives. Raises openai.OpenAIError."""
    answer = StreamedAnswer()
    sent = last = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=temperature,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    with stream:
        for chunk in stream:
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                ids: list[Any] = (choice.model_extra or {}).get("token_ids") or []
                if ids:
                    now = time.monotonic()
                    if answer.token_ids:
                        answer.gaps += [(now - last) / len(ids)] * len(ids)
                    else:
                        answer.ttft = now - sent
                    last = now
                    answer.token_ids += ids
                if choice.delta.content:
                    answer.text += choice.delta.content
                    on_text(choice.delta.content)
    return answer
