"""Answer format of /v1/completions: text choices, and logprobs as parallel lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.batch import TokenLogprob
from splitserve.server.answer import Delta, SampleAnswer
from splitserve.server.openai_reply import Reply, finish_reason, has_news, with_chosen


@dataclass(slots=True)
class CompletionForm:
    reply: Reply
    tokenizer: Tokenizer
    # Alternatives per token. None: no logprobs.
    num_logprobs: int | None
    # Prompts' texts to repeat before the answers. None: no echo.
    echo: Sequence[str] | None
    # Choice -> characters of token texts written so far.
    _offsets: dict[int, int] = field(default_factory=dict)

    def answer(self, answers: Sequence[SampleAnswer]) -> BaseModel:
        choices = [self._choice(a, Delta(a.text, a.output_ids, a.logprobs, is_first=True)) for a in answers]
        return self._completion(choices, {"usage": self.reply.usage(answers)} | self._prompt_ids(answers))

    def chunks(self, answer: SampleAnswer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        wants_tokens = self.num_logprobs is not None or self.reply.with_token_ids
        is_echo = self.echo is not None and delta.is_first
        if is_echo or has_news(answer, delta, wants_tokens=wants_tokens):
            extra = self._prompt_ids([answer]) if delta.is_first else {}
            yield self._completion([self._choice(answer, delta)], usage | extra)

    def last_chunk(self, usage: CompletionUsage) -> BaseModel:
        return self._completion([], {"usage": usage})

    def _completion(self, choices: list[CompletionChoice], extra: dict[str, Any]) -> Completion:
        return Completion(
            id=self.reply.id,
            object="text_completion",
            created=self.reply.created,
            model=self.reply.model,
            choices=choices,
            **extra,
        )

    def _choice(self, answer: SampleAnswer, delta: Delta) -> CompletionChoice:
        is_echo = self.echo is not None and delta.is_first
        text = delta.text
        if self.echo is not None and is_echo:
            text = self.echo[answer.sample.prompt_index] + text
        extra: dict[str, Any] = {}
        if self.reply.with_token_ids:
            extra["token_ids"] = delta.token_ids
            if delta.is_first:
                extra["prompt_token_ids"] = answer.prompt_ids
        # Skip validation, also of the logprobs: the API allows nulls in mid-stream, the openai package's types do not.
        return CompletionChoice.model_construct(
            index=answer.sample.index,
            text=text,
            finish_reason=finish_reason(answer),
            logprobs=self._logprobs(answer, delta, is_echo),
            **extra,
        )

    def _prompt_ids(self, answers: Sequence[SampleAnswer]) -> dict[str, Any]:
        """Return the prompt tokens as a field of the answer itself, if there is one prompt."""
        one_prompt = len({a.sample.prompt_index for a in answers}) == 1
        return {"prompt_token_ids": answers[0].prompt_ids} if self.reply.with_token_ids and one_prompt else {}

    def _logprobs(self, answer: SampleAnswer, delta: Delta, is_echo: bool) -> Logprobs | None:
        if self.num_logprobs is None:
            return None
        tokens: list[tuple[int, TokenLogprob | None]] = [(t.token_id, t) for t in delta.logprobs]
        if is_echo:
            tokens = [*_scored_prompt(answer), *tokens]
        texts = [self.tokenizer.token_text(token_id) for token_id, _ in tokens]
        offset = self._offsets.get(answer.sample.index, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[answer.sample.index] = offset
        return Logprobs.model_construct(
            tokens=texts,
            token_logprobs=[None if t is None else t.logprob for _, t in tokens],
            top_logprobs=[None if t is None else self._top(t) for _, t in tokens] if self.num_logprobs else None,
            text_offset=offsets,
        )

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the logprobs by text. If two tokens have one text, the likelier, which comes first, keeps it."""
        top: dict[str, float] = {}
        for token_id, logprob in with_chosen(token):
            top.setdefault(self.tokenizer.token_text(token_id), logprob)
        return top


def _scored_prompt(answer: SampleAnswer) -> list[tuple[int, TokenLogprob | None]]:
    """Return the prompt tokens and their logprobs.

    The first token has no logprob. If this worker did not compute the prompt, no token has one.
    """
    unscored = len(answer.prompt_ids) - len(answer.input_logprobs)
    return [
        *((token_id, None) for token_id in answer.prompt_ids[:unscored]),
        *((t.token_id, t) for t in answer.input_logprobs),
    ]
