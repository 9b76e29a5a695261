"""The form of /v1/chat/completions: a message of the assistant, or deltas of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat import chat_completion as whole
from openai.types.chat import chat_completion_chunk as part
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from pydantic import BaseModel

from splitserve.core.batch import TokenLogprob
from splitserve.server.answer import Answer, Delta
from splitserve.server.openai_reply import Reply, finish_reason, has_news
from splitserve.server.tokenizer import Tokenizer


@dataclass(slots=True)
class ChatForm:
    reply: Reply
    tokenizer: Tokenizer
    with_logprobs: bool

    def answer(self, answers: Sequence[Answer]) -> BaseModel:
        return ChatCompletion(
            id=self.reply.id,
            object="chat.completion",
            created=self.reply.created,
            model=self.reply.model,
            choices=[self._whole_choice(a) for a in answers],
            usage=self.reply.usage(answers),
            **self._prompt_ids(answers[0]),
        )

    def chunks(self, answer: Answer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        index = answer.sample.index
        if delta.is_first:
            opening = part.Choice(
                index=index, delta=part.ChoiceDelta(role="assistant", content=""), finish_reason=None, logprobs=None
            )
            yield self._chunk([opening], usage | self._prompt_ids(answer))
        if has_news(answer, delta, wants_tokens=self.with_logprobs or self.reply.with_token_ids):
            extra: dict[str, Any] = {"token_ids": delta.token_ids} if self.reply.with_token_ids else {}
            content: dict[str, Any] = {"content": delta.text} if delta.text or answer.finish is None else {}
            choice = part.Choice(
                index=index,
                delta=part.ChoiceDelta(**content),
                finish_reason=finish_reason(answer),
                logprobs=part.ChoiceLogprobs(content=self._logprobs(delta.logprobs)) if self.with_logprobs else None,
                **extra,
            )
            yield self._chunk([choice], usage)

    def last_chunk(self, usage: CompletionUsage) -> BaseModel:
        return self._chunk([], {"usage": usage})

    def _whole_choice(self, answer: Answer) -> whole.Choice:
        extra: dict[str, Any] = {"token_ids": answer.output_ids} if self.reply.with_token_ids else {}
        return whole.Choice(
            index=answer.sample.index,
            message=ChatCompletionMessage(role="assistant", content=answer.text, refusal=None),
            finish_reason=finish_reason(answer),
            logprobs=whole.ChoiceLogprobs(content=self._logprobs(answer.logprobs)) if self.with_logprobs else None,
            **extra,
        )

    def _chunk(self, choices: list[part.Choice], extra: dict[str, Any]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.reply.id,
            object="chat.completion.chunk",
            created=self.reply.created,
            model=self.reply.model,
            choices=choices,
            **extra,
        )

    def _prompt_ids(self, answer: Answer) -> dict[str, Any]:
        return {"prompt_token_ids": answer.prompt_ids} if self.reply.with_token_ids else {}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                **self._token(t.token_id, t.logprob),
                top_logprobs=[TopLogprob(**self._token(token_id, logprob)) for token_id, logprob in t.top],
            )
            for t in tokens
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }
