"""OpenAI API: /v1/completions, /v1/chat/completions, /v1/models. A body becomes prompts and a reply format.

The formats write whole answers and streamed chunks, of completions and of chat completions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from splitserve.api import validation
from splitserve.api.grammars import grammar_path, openai_grammar
from splitserve.api.openapi import OPERATIONS
from splitserve.api.prompt_tokens import chat_tokens
from splitserve.api.responses import event_of, json_response
from splitserve.api.schemas import ChatBody, CompletionBody, OpenAIBody
from splitserve.api.tools import CallDelta, Parsed, ToolCallParser, ToolForm
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError
from splitserve.core.request import FinishType
from splitserve.server.detokenizer import Detokenizer
from splitserve.server.front_end import FrontEnd
from splitserve.server.generate_route import Prompts, ReplyFormat, prompt_spec, serve
from splitserve.server.generation import Delta, SampleAnswer

Json = dict[str, Any]


def openai_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.post("/v1/completions", **OPERATIONS["/v1/completions"])
    async def completions(request: Request) -> Response:
        return await serve(front, request, CompletionBody, read_completion)

    @router.post("/v1/chat/completions", **OPERATIONS["/v1/chat/completions"])
    async def chat_completions(request: Request) -> Response:
        return await serve(front, request, ChatBody, read_chat)

    @router.get("/v1/models", **OPERATIONS["/v1/models"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(front, started)]})

    @router.get("/v1/models/{name:path}", **OPERATIONS["/v1/models/{name}"])
    async def model(name: str) -> Response:
        front.check_model(name)
        return json_response(_model(front, started))

    return router


def read_completion(front: FrontEnd, body: CompletionBody, rid: str | list[str]) -> Prompts:
    """Return the prompts of a body and its reply format. Raises InvalidRequestError, UnknownModelError."""
    front.check_model(body.model)
    prompts, _ = validation.prompt_list(body.prompt, "prompt")
    grammar = openai_grammar(body)
    specs = [
        prompt_spec(
            front,
            front.tokenizer.encode(prompt, max_tokens=front.context_length, name="prompt"),
            body,
            grammar,
            name="prompt",
            num_logprobs=body.logprobs,
            hidden_states=body.return_hidden_states,
            top_name="logprobs",
            logprob_start=0 if body.echo and body.logprobs is not None else -1,
        )
        for prompt in prompts
    ]
    echo = None
    if body.echo:
        echo = [p if isinstance(p, str) else front.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    return Prompts(specs, body.n, CompletionFormat(front, body, rid, echo), grammar_path(body))


def read_chat(front: FrontEnd, body: ChatBody, rid: str | list[str]) -> Prompts:
    """Return the prompt of a conversation and its reply format. Raises InvalidRequestError, UnknownModelError."""
    front.check_model(body.model)
    token_ids, use = chat_tokens(front.tokenizer, body, front.context_length)
    grammar = openai_grammar(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    spec = prompt_spec(
        front,
        token_ids,
        body,
        use.grammar(grammar, front.config.server.limits.max_grammar_chars) if use else grammar,
        name="messages",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        hidden_states=body.return_hidden_states,
        top_name="top_logprobs",
    )
    return Prompts([spec], body.n, ChatFormat(front, body, rid, use.form if use else None), grammar_path(body))


def _model(front: FrontEnd, started: int) -> Json:
    info = front.scheduler.info
    return {
        "id": front.config.served_model_name,
        "object": "model",
        "created": started,
        "owned_by": "splitserve",
        "root": front.model_path,
        "max_model_len": None if info is None else info.max_total_tokens_per_request,
    }


class OpenAIFormat(ReplyFormat):
    """Parts that both formats share."""

    prefix: str
    # Field `object` of whole answers and of chunks.
    whole_name: str
    chunk_name: str
    # Whether the answers leave out the output.
    _has_no_output = False

    def __init__(self, front: FrontEnd, body: OpenAIBody, rid: str | list[str]) -> None:
        options, dispatch = body.stream_options, body.dispatch
        self._tokenizer = front.tokenizer
        self._id = f"{self.prefix}-{rid if isinstance(rid, str) else rid[0]}"
        self._model = body.model or front.config.served_model_name
        # Equal in all attempts of a request.
        self._created = int(time.time()) if dispatch is None or dispatch.created is None else dispatch.created
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._with_token_ids = bool(body.return_token_ids)
        self._with_hidden_states = bool(body.return_hidden_states)
        # Samples of one prompt; choice i belongs to prompt i // n.
        self._n = body.n or 1

    def answer(self, answers: Sequence[SampleAnswer]) -> bytes:
        extra = {"usage": self._usage(answers)} | self._prompt_ids(answers)
        return self._json(self.whole_name, [self._whole_choice(a) for a in answers], extra)

    def frame(self, answer: SampleAnswer, delta: Delta, answers: Sequence[SampleAnswer]) -> bytes:
        usage: Json = {}
        if self._include_usage:
            usage = {"usage": self._usage(answers) if self._continuous_usage else None}
        chunks = self._chunks(answer, delta)
        return b"".join(event_of(self._json(self.chunk_name, [choice], usage | more)) for choice, more in chunks)

    def end(self, answers: Sequence[SampleAnswer]) -> bytes:
        if not self._include_usage:
            return b""
        return event_of(self._json(self.chunk_name, [], {"usage": self._usage(answers)}))

    def _whole_choice(self, answer: SampleAnswer) -> Json:
        raise NotImplementedError

    def _chunks(self, answer: SampleAnswer, delta: Delta) -> Iterable[tuple[Json, Json]]:
        """Return the choice and further fields of each chunk of this delta: none, one, or an opening chunk and one."""
        raise NotImplementedError

    def _json(self, name: str, choices: list[Json], extra: Json) -> bytes:
        fields = {"id": self._id, "object": name, "created": self._created, "model": self._model, "choices": choices}
        return msgspec.json.encode(fields | extra)

    def _usage(self, answers: Sequence[SampleAnswer]) -> Json:
        """Return the usage. A prompt and its cached tokens count once, whatever n is."""
        first_samples = answers[:: self._n]
        prompt = sum(len(a.prompt_ids) for a in first_samples)
        completion = 0 if self._has_no_output else sum(len(a.output_ids) for a in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(a.num_cached_tokens for a in first_samples)},
        }

    def _per_token(self, answer: SampleAnswer, token_ids: list[int]) -> Json:
        """Return the fields of a choice with one entry per token, if they are requested."""
        ids = {"token_ids": token_ids} if self._with_token_ids else {}
        return ids | ({"hidden_states": answer.take_hidden_states()} if self._with_hidden_states else {})

    @property
    def _wants_tokens(self) -> bool:
        """Return whether tokens without text need a chunk."""
        return self._with_token_ids or self._with_hidden_states

    def _prompt_ids(self, answers: Sequence[SampleAnswer]) -> Json:
        """Return the prompt tokens as a field of the answer itself, if they are requested and there is one prompt."""
        has_one = self._with_token_ids and len({a.sample.prompt_index for a in answers}) == 1
        return {"prompt_token_ids": answers[0].prompt_ids} if has_one else {}


class CompletionFormat(OpenAIFormat):
    """Format of /v1/completions: text choices, and logprobs as parallel lists.

    `echo`: prompts' texts to repeat before the answers. None: no echo.
    """

    prefix = "cmpl"
    whole_name = chunk_name = "text_completion"

    def __init__(self, front: FrontEnd, body: CompletionBody, rid: str | list[str], echo: Sequence[str] | None) -> None:
        super().__init__(front, body, rid)
        # Alternatives per token. None: no logprobs.
        self._num_logprobs = body.logprobs
        self._echo, self._has_no_output = echo, body.has_no_output
        self.scores_echo = echo is not None and body.logprobs is not None

    def _whole_choice(self, answer: SampleAnswer) -> Json:
        return self._choice(answer, Delta(answer.text, answer.output_ids, answer.logprobs, is_first=True))

    def _chunks(self, answer: SampleAnswer, delta: Delta) -> Iterable[tuple[Json, Json]]:
        wants_tokens = self._num_logprobs is not None or self._wants_tokens
        is_echo = self._echo is not None and delta.is_first
        if is_echo or _has_news(answer, delta, wants_tokens=wants_tokens):
            yield self._choice(answer, delta), self._prompt_ids([answer]) if delta.is_first else {}

    def _choice(self, answer: SampleAnswer, delta: Delta) -> Json:
        finish = _finish_reason(answer)
        if self._has_no_output:
            answer.take_hidden_states()
            delta, finish = Delta("", [], [], delta.is_first), "length" if finish == "stop" else finish
        text, is_echo = delta.text, False
        if self._echo is not None and delta.is_first:
            text, is_echo = self._echo[answer.sample.prompt_index] + text, True
        choice: Json = {
            "index": answer.sample.index,
            "text": text,
            "finish_reason": finish,
            "logprobs": None if self._num_logprobs is None else self._logprobs(answer, delta, is_echo),
        }
        choice |= self._per_token(answer, delta.token_ids)
        if self._with_token_ids and delta.is_first:
            choice["prompt_token_ids"] = answer.prompt_ids
        return choice

    def _logprobs(self, answer: SampleAnswer, delta: Delta, is_echo: bool) -> Json:
        tokens: list[tuple[int, TokenLogprob | None]] = [(t.token_id, t) for t in delta.logprobs]
        echo = "" if self._echo is None else self._echo[answer.sample.prompt_index]
        first = len(answer.logprobs) - len(delta.logprobs)
        offsets = [len(echo) + offset for offset in answer.text_offsets[first:]]
        if is_echo:
            tokens = [*_scored_prompt(answer), *tokens]
            offsets = [*self._prompt_offsets(answer.prompt_ids, echo), *offsets]
        return {
            "tokens": [self._tokenizer.token_text(token_id) for token_id, _ in tokens],
            "token_logprobs": [None if t is None else t.logprob for _, t in tokens],
            "top_logprobs": [None if t is None else self._top(t) for _, t in tokens] if self._num_logprobs else None,
            "text_offset": offsets,
        }

    def _prompt_offsets(self, prompt_ids: Sequence[int], echo: str) -> list[int]:
        """Return the offset of each token in the echo. Special tokens may precede its text."""
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        offsets = []
        for token_id in prompt_ids:
            offsets.append(detokenizer.num_chars)
            detokenizer.push(token_id)
        detokenizer.finish()
        num_added = max(0, detokenizer.num_chars - len(echo))
        return [max(0, offset - num_added) for offset in offsets]

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

    prefix = "chatcmpl"
    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, front: FrontEnd, body: ChatBody, rid: str | list[str], tool_form: ToolForm | None) -> None:
        super().__init__(front, body, rid)
        self.continues_prompt = bool(body.continue_final_message)
        self._with_logprobs = bool(body.logprobs)
        self._tool_form = tool_form
        # Choice -> parser of the calls in its text.
        self._parsers: dict[int, ToolCallParser] = {}

    def _chunks(self, answer: SampleAnswer, delta: Delta) -> Iterable[tuple[Json, Json]]:
        index = answer.sample.index
        parsed = self._parse(answer, delta.text)
        delta = dataclasses.replace(delta, text=parsed.text)
        if delta.is_first:
            opening = {"role": "assistant", "content": ""}
            yield (
                {"index": index, "delta": opening, "finish_reason": None, "logprobs": None},
                self._prompt_ids([answer]),
            )
        wants_tokens = self._with_logprobs or self._wants_tokens
        if parsed.calls or _has_news(answer, delta, wants_tokens=wants_tokens):
            has_text = bool(delta.text) or (answer.finish is None and not parsed.calls)
            content: Json = {"content": delta.text} if has_text else {}
            if parsed.calls:
                content["tool_calls"] = _call_chunks(parsed.calls)
            yield self._choice(answer, {"delta": content}, delta.logprobs, delta.token_ids), {}

    def _whole_choice(self, answer: SampleAnswer) -> Json:
        parsed = self._parse(answer, answer.text)
        message: Json = {"role": "assistant", "refusal": None, "content": parsed.text}
        if parsed.calls:
            message |= {"content": parsed.text or None, "tool_calls": _whole_calls(parsed.calls)}
        return self._choice(answer, {"message": message}, answer.logprobs, answer.output_ids)

    def _choice(
        self, answer: SampleAnswer, content: Json, logprobs: Sequence[TokenLogprob], token_ids: list[int]
    ) -> Json:
        choice = {
            "index": answer.sample.index,
            **content,
            "finish_reason": self._call_or_finish(answer),
            "logprobs": {"content": self._logprobs(logprobs)} if self._with_logprobs else None,
        }
        return choice | self._per_token(answer, token_ids)

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

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[Json]:
        return [
            self._token(t.token_id, t.logprob) | {"top_logprobs": [self._token(*alternative) for alternative in t.top]}
            for t in tokens
        ]

    def _token(self, token_id: int, logprob: float) -> Json:
        tokenizer = self._tokenizer
        text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


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


def _call_chunks(deltas: Sequence[CallDelta]) -> list[Json]:
    """Return the deltas, one for each call: many clients read the first one of a chunk only."""
    chunks: dict[int, Json] = {}
    for delta in deltas:
        chunk = chunks.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.name is not None:
            chunk |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        chunk["function"]["arguments"] += delta.arguments
    return list(chunks.values())


def _whole_calls(deltas: Sequence[CallDelta]) -> list[Json]:
    calls: list[Json] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls
