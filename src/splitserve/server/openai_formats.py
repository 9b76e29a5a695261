"""Reply formats of the OpenAI API: whole answers and streamed chunks, of completions and of chat completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from openai.types import Completion, CompletionChoice, CompletionUsage
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
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from splitserve.api.schemas import ChatBody, CompletionBody, OpenAIBody
from splitserve.api.sse import event_of
from splitserve.api.tools import CallDelta, Parsed, ToolCallParser, ToolForm
from splitserve.core.batch import TokenLogprob
from splitserve.core.request import FinishType
from splitserve.server.answer import Delta, SampleAnswer
from splitserve.server.front_end import FrontEnd

M = TypeVar("M", bound=BaseModel)


class OpenAIFormat:
    """Parts that both formats share. Models are written without the fields that were never set."""

    def __init__(self, front: FrontEnd, body: OpenAIBody, rid: str | list[str], prefix: str) -> None:
        options, dispatch = body.stream_options, body.dispatch
        self._tokenizer = front.tokenizer
        self._id = f"{prefix}-{rid if isinstance(rid, str) else rid[0]}"
        self._model = body.model or front.served_model_name
        # Equal in all attempts of a request.
        self._created = int(time.time()) if dispatch is None or dispatch.created is None else dispatch.created
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._with_token_ids = bool(body.return_token_ids)
        # Samples of one prompt; choice i belongs to prompt i // n.
        self._n = body.n or 1

    def answer(self, answers: Sequence[SampleAnswer]) -> bytes:
        return _dump(self._whole(answers, {"usage": self._usage(answers)} | self._prompt_ids(answers)))

    def frame(self, answer: SampleAnswer, delta: Delta, answers: Sequence[SampleAnswer]) -> bytes:
        usage: dict[str, Any] = {}
        if self._include_usage:
            usage = {"usage": self._usage(answers) if self._continuous_usage else None}
        return b"".join(event_of(_dump(chunk)) for chunk in self._chunks(answer, delta, usage))

    def end(self, answers: Sequence[SampleAnswer]) -> bytes:
        return event_of(_dump(self._chunk([], {"usage": self._usage(answers)}))) if self._include_usage else b""

    def _whole(self, answers: Sequence[SampleAnswer], extra: dict[str, Any]) -> BaseModel:
        raise NotImplementedError

    def _chunks(self, answer: SampleAnswer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        """Return the chunks of this delta: none, one, or an opening chunk and one."""
        raise NotImplementedError

    def _chunk(self, choices: list[Any], extra: dict[str, Any]) -> BaseModel:
        raise NotImplementedError

    def _envelope(self, model: type[M], name: str, choices: list[Any], extra: dict[str, Any]) -> M:
        return model(id=self._id, object=name, created=self._created, model=self._model, choices=choices, **extra)

    def _usage(self, answers: Sequence[SampleAnswer]) -> CompletionUsage:
        """Return the usage. A prompt and its cached tokens count once, whatever n is."""
        first_samples = answers[:: self._n]
        prompt = sum(len(a.prompt_ids) for a in first_samples)
        completion = sum(len(a.output_ids) for a in answers)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(a.num_cached_tokens for a in first_samples)),
        )

    def _prompt_ids(self, answers: Sequence[SampleAnswer]) -> dict[str, Any]:
        """Return the prompt tokens as a field of the answer itself, if they are requested and there is one prompt."""
        has_one = self._with_token_ids and len({a.sample.prompt_index for a in answers}) == 1
        return {"prompt_token_ids": answers[0].prompt_ids} if has_one else {}


class CompletionFormat(OpenAIFormat):
    """Format of /v1/completions: text choices, and logprobs as parallel lists.

    `echo`: prompts' texts to repeat before the answers. None: no echo.
    """

    def __init__(self, front: FrontEnd, body: CompletionBody, rid: str | list[str], echo: Sequence[str] | None) -> None:
        super().__init__(front, body, rid, "cmpl")
        # Alternatives per token. None: no logprobs.
        self._num_logprobs = body.logprobs
        self._echo = echo
        # Choice -> characters of token texts written so far.
        self._offsets: dict[int, int] = {}

    def _whole(self, answers: Sequence[SampleAnswer], extra: dict[str, Any]) -> BaseModel:
        return self._chunk(
            [self._choice(a, Delta(a.text, a.output_ids, a.logprobs, is_first=True)) for a in answers], extra
        )

    def _chunks(self, answer: SampleAnswer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        wants_tokens = self._num_logprobs is not None or self._with_token_ids
        is_echo = self._echo is not None and delta.is_first
        if is_echo or _has_news(answer, delta, wants_tokens=wants_tokens):
            extra = self._prompt_ids([answer]) if delta.is_first else {}
            yield self._chunk([self._choice(answer, delta)], usage | extra)

    def _chunk(self, choices: list[Any], extra: dict[str, Any]) -> BaseModel:
        return self._envelope(Completion, "text_completion", choices, extra)

    def _choice(self, answer: SampleAnswer, delta: Delta) -> CompletionChoice:
        text, is_echo = delta.text, False
        if self._echo is not None and delta.is_first:
            text, is_echo = self._echo[answer.sample.prompt_index] + text, True
        extra: dict[str, Any] = {}
        if self._with_token_ids:
            extra["token_ids"] = delta.token_ids
            if delta.is_first:
                extra["prompt_token_ids"] = answer.prompt_ids
        # Skip validation, also of the logprobs: the API allows nulls in mid-stream, the openai package's types do not.
        return CompletionChoice.model_construct(
            index=answer.sample.index,
            text=text,
            finish_reason=_finish_reason(answer),
            logprobs=None if self._num_logprobs is None else self._logprobs(answer, delta, is_echo),
            **extra,
        )

    def _logprobs(self, answer: SampleAnswer, delta: Delta, is_echo: bool) -> Logprobs:
        tokens: list[tuple[int, TokenLogprob | None]] = [(t.token_id, t) for t in delta.logprobs]
        if is_echo:
            tokens = [*_scored_prompt(answer), *tokens]
        texts = [self._tokenizer.token_text(token_id) for token_id, _ in tokens]
        offset = self._offsets.get(answer.sample.index, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[answer.sample.index] = offset
        return Logprobs.model_construct(
            tokens=texts,
            token_logprobs=[None if t is None else t.logprob for _, t in tokens],
            top_logprobs=[None if t is None else self._top(t) for _, t in tokens] if self._num_logprobs else None,
            text_offset=offsets,
        )

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the logprobs by text, including the chosen token.

        If two tokens have one text, the likelier, which comes first, keeps it.
        """
        alternatives = list(token.top)
        if not any(token_id == token.token_id for token_id, _ in alternatives):
            alternatives.append((token.token_id, token.logprob))
        top: dict[str, float] = {}
        for token_id, logprob in alternatives:
            top.setdefault(self._tokenizer.token_text(token_id), logprob)
        return top


class ChatFormat(OpenAIFormat):
    """Format of /v1/chat/completions: an assistant's message with its tool calls, or deltas of it.

    `tool_form`: format of calls in the answers' text. None: there are no tools to call.
    """

    def __init__(self, front: FrontEnd, body: ChatBody, rid: str | list[str], tool_form: ToolForm | None) -> None:
        super().__init__(front, body, rid, "chatcmpl")
        self._with_logprobs = bool(body.logprobs)
        self._tool_form = tool_form
        # Choice -> parser of the calls in its text.
        self._parsers: dict[int, ToolCallParser] = {}

    def _whole(self, answers: Sequence[SampleAnswer], extra: dict[str, Any]) -> BaseModel:
        return self._envelope(ChatCompletion, "chat.completion", [self._whole_choice(a) for a in answers], extra)

    def _chunks(self, answer: SampleAnswer, delta: Delta, usage: dict[str, Any]) -> Iterable[BaseModel]:
        index = answer.sample.index
        parsed = self._parse(answer, delta.text)
        delta = dataclasses.replace(delta, text=parsed.text)
        if delta.is_first:
            opening = part.Choice(
                index=index, delta=part.ChoiceDelta(role="assistant", content=""), finish_reason=None, logprobs=None
            )
            yield self._chunk([opening], usage | self._prompt_ids([answer]))
        wants_tokens = self._with_logprobs or self._with_token_ids
        if parsed.calls or _has_news(answer, delta, wants_tokens=wants_tokens):
            extra: dict[str, Any] = {"token_ids": delta.token_ids} if self._with_token_ids else {}
            has_text = bool(delta.text) or (answer.finish is None and not parsed.calls)
            content: dict[str, Any] = {"content": delta.text} if has_text else {}
            if parsed.calls:
                content["tool_calls"] = [_call_chunk(call) for call in parsed.calls]
            # Skip validation: the openai package does not know the finish reason "abort".
            choice = part.Choice.model_construct(
                index=index,
                delta=part.ChoiceDelta(**content),
                finish_reason=self._call_or_finish(answer),
                logprobs=part.ChoiceLogprobs(content=self._logprobs(delta.logprobs)) if self._with_logprobs else None,
                **extra,
            )
            yield self._chunk([choice], usage)

    def _chunk(self, choices: list[Any], extra: dict[str, Any]) -> BaseModel:
        return self._envelope(ChatCompletionChunk, "chat.completion.chunk", choices, extra)

    def _whole_choice(self, answer: SampleAnswer) -> whole.Choice:
        extra: dict[str, Any] = {"token_ids": answer.output_ids} if self._with_token_ids else {}
        parsed = self._parse(answer, answer.text)
        content: dict[str, Any] = {"content": parsed.text}
        if parsed.calls:
            content = {"content": parsed.text or None, "tool_calls": _whole_calls(parsed.calls)}
        return whole.Choice.model_construct(
            index=answer.sample.index,
            message=ChatCompletionMessage(role="assistant", refusal=None, **content),
            finish_reason=self._call_or_finish(answer),
            logprobs=whole.ChoiceLogprobs(content=self._logprobs(answer.logprobs)) if self._with_logprobs else None,
            **extra,
        )

    def _parse(self, answer: SampleAnswer, text: str) -> Parsed:
        """Return new text of an answer without its calls, and the calls."""
        if self._tool_form is None:
            return Parsed(text)
        parser = self._parsers.setdefault(answer.sample.index, ToolCallParser(self._tool_form))
        parsed = parser.push(text)
        if answer.finish is not None:
            parsed.text += parser.finish().text
        return parsed

    def _call_or_finish(self, answer: SampleAnswer) -> Any:
        parser = self._parsers.get(answer.sample.index)
        is_call = parser is not None and parser.num_calls > 0
        has_stopped = answer.finish is not None and answer.finish.type is FinishType.STOP
        return "tool_calls" if is_call and has_stopped else _finish_reason(answer)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                **self._token(t.token_id, t.logprob),
                top_logprobs=[TopLogprob(**self._token(token_id, logprob)) for token_id, logprob in t.top],
            )
            for t in tokens
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._tokenizer
        text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _dump(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True, warnings=False).encode()


def _has_news(answer: SampleAnswer, delta: Delta, *, wants_tokens: bool) -> bool:
    """Return whether a delta needs a chunk: text, the end, or tokens if the client requested them."""
    return bool(delta.text) or answer.finish is not None or (wants_tokens and bool(delta.token_ids))


def _finish_reason(answer: SampleAnswer) -> Any:
    """Return "stop", "length", or "abort" if the abort was ordered. None: the sample is still running."""
    return None if answer.finish is None else str(answer.finish.type)


def _scored_prompt(answer: SampleAnswer) -> list[tuple[int, TokenLogprob | None]]:
    """Return the prompt tokens and their logprobs.

    The first token has no logprob. If this worker did not compute the prompt, no token has one.
    """
    unscored = len(answer.prompt_ids) - len(answer.input_logprobs)
    return [
        *((token_id, None) for token_id in answer.prompt_ids[:unscored]),
        *((t.token_id, t) for t in answer.input_logprobs),
    ]


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
