"""Answer format of /v1/chat/completions: an assistant's message with its tool calls, or deltas of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionTokenLogprob,
)
from openai.types.chat import chat_completion as whole
from openai.types.chat import chat_completion_chunk as part
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from pydantic import BaseModel

from splitserve.api.tokenizer import Tokenizer
from splitserve.api.tool_calls import CallDelta, Parsed, ToolCallParser
from splitserve.api.tools import ToolForm
from splitserve.core.batch import TokenLogprob
from splitserve.core.request import FinishType
from splitserve.server.answer import Delta, SampleAnswer
from splitserve.server.openai_reply import Reply, finish_reason, has_news


@dataclass(slots=True)
class ChatForm:
    reply: Reply
    tokenizer: Tokenizer
    with_logprobs: bool
    # Format of calls in the answers' text. None: there are no tools to call.
    tool_form: ToolForm | None = None
    # Choice -> parser of the calls in its text.
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def answer(self, answers: Sequence[SampleAnswer]) -> BaseModel:
        return ChatCompletion(
            id=self.reply.id,
            object="chat.completion",
            created=self.reply.created,
            model=self.reply.model,
            choices=[self._whole_choice(a) for a in answers],
            usage=self.reply.usage(answers),
            **self._prompt_ids(answers[0]),
        )

    def chunks(self, answer: SampleAnswer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        index = answer.sample.index
        parsed = self._parse(answer, delta.text)
        delta = dataclasses.replace(delta, text=parsed.text)
        if delta.is_first:
            opening = part.Choice(
                index=index, delta=part.ChoiceDelta(role="assistant", content=""), finish_reason=None, logprobs=None
            )
            yield self._chunk([opening], usage | self._prompt_ids(answer))
        wants_tokens = self.with_logprobs or self.reply.with_token_ids
        if parsed.calls or has_news(answer, delta, wants_tokens=wants_tokens):
            extra: dict[str, Any] = {"token_ids": delta.token_ids} if self.reply.with_token_ids else {}
            has_text = bool(delta.text) or (answer.finish is None and not parsed.calls)
            content: dict[str, Any] = {"content": delta.text} if has_text else {}
            if parsed.calls:
                content["tool_calls"] = [_call_chunk(call) for call in parsed.calls]
            # Skip validation: the openai package does not know the finish reason "abort".
            choice = part.Choice.model_construct(
                index=index,
                delta=part.ChoiceDelta(**content),
                finish_reason=self._finish_reason(answer),
                logprobs=part.ChoiceLogprobs(content=self._logprobs(delta.logprobs)) if self.with_logprobs else None,
                **extra,
            )
            yield self._chunk([choice], usage)

    def last_chunk(self, usage: CompletionUsage) -> BaseModel:
        return self._chunk([], {"usage": usage})

    def _whole_choice(self, answer: SampleAnswer) -> whole.Choice:
        extra: dict[str, Any] = {"token_ids": answer.output_ids} if self.reply.with_token_ids else {}
        parsed = self._parse(answer, answer.text)
        content: dict[str, Any] = {"content": parsed.text}
        if parsed.calls:
            content = {"content": parsed.text or None, "tool_calls": _whole_calls(parsed.calls)}
        return whole.Choice.model_construct(
            index=answer.sample.index,
            message=ChatCompletionMessage(role="assistant", refusal=None, **content),
            finish_reason=self._finish_reason(answer),
            logprobs=whole.ChoiceLogprobs(content=self._logprobs(answer.logprobs)) if self.with_logprobs else None,
            **extra,
        )

    def _parse(self, answer: SampleAnswer, text: str) -> Parsed:
        """Return new text of an answer without its calls, and the calls."""
        if self.tool_form is None:
            return Parsed(text)
        parser = self._parsers.setdefault(answer.sample.index, ToolCallParser(self.tool_form))
        parsed = parser.push(text)
        if answer.finish is not None:
            parsed.text += parser.finish().text
        return parsed

    def _finish_reason(self, answer: SampleAnswer) -> Any:
        parser = self._parsers.get(answer.sample.index)
        is_call = parser is not None and parser.num_calls > 0
        has_stopped = answer.finish is not None and answer.finish.type is FinishType.STOP
        return "tool_calls" if is_call and has_stopped else finish_reason(answer)

    def _chunk(self, choices: list[part.Choice], extra: dict[str, Any]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.reply.id,
            object="chat.completion.chunk",
            created=self.reply.created,
            model=self.reply.model,
            choices=choices,
            **extra,
        )

    def _prompt_ids(self, answer: SampleAnswer) -> dict[str, Any]:
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


def _call_chunk(call: CallDelta) -> part.ChoiceDeltaToolCall:
    if call.name is None:
        function = part.ChoiceDeltaToolCallFunction(arguments=call.arguments)
        return part.ChoiceDeltaToolCall(index=call.index, function=function)
    function = part.ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return part.ChoiceDeltaToolCall(index=call.index, id=call.id, type="function", function=function)


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ChatCompletionMessageFunctionToolCall]:
    calls: list[ChatCompletionMessageFunctionToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            function = Function(name=delta.name, arguments="")
            calls.append(ChatCompletionMessageFunctionToolCall(id=delta.id, type="function", function=function))
        calls[delta.index].function.arguments += delta.arguments
    return calls
