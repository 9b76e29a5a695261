"""The front end's tiny world: a byte-level tokenizer, and a scheduler that repeats the prompt, over real ZMQ."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import zmq
import zmq.asyncio
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from splitserve.core.batch import TokenLogprob
from splitserve.core.messages import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    FromScheduler,
    GenerateRequest,
    KVIndexReply,
    KVIndexRequest,
    MemoryRequest,
    RoleReply,
    RoleRequest,
    RoleStep,
    SchedulerReady,
    SchedulerState,
    SpeculationStats,
    StateReply,
    StateRequest,
    StepOutputs,
    StepsReply,
    StepsRequest,
    TokenOutput,
    TransferStats,
    decode_to_scheduler,
    encode,
)
from splitserve.core.request import FinishReason, FinishType, Request
from splitserve.core.steps import ClockReading, StepPage
from splitserve.core.timeline import Span, Stage, StageReport

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LIMIT = 256
READY = SchedulerReady(
    max_total_tokens_per_request=LIMIT,
    vocab_size=258,
    pages_total=64,
    page_size=16,
    dtype="float32",
    kv_bytes_per_token=4,
    device="cpu",
    num_parameters=1,
    load_seconds=0.1,
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, and two special tokens: 256 begins a message, 257 ends it."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


def stripping_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer in the form of Llama 2: "▁" begins a word, and the decoder strips the first space of a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in "€🙂".encode()), *"▁abc", "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_tokenizer_folder(folder: Path, *, chat_template: bool = True) -> Path:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    if chat_template:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def request_of(message: GenerateRequest) -> Request:
    return Request(
        message.rid,
        message.prompt_ids,
        message.params,
        eos_token_ids=frozenset([257]),
        output_ids=list(message.output_ids),
        num_given_tokens=len(message.output_ids),
    )


def state_of(message: GenerateRequest, token_id: int, position: int) -> list[bytes]:
    """Return the hidden state of an echoed token, if it is requested."""
    return [array("f", [token_id, position]).tobytes()] if message.return_hidden_states else []


def stages_of(request: Request, *, is_first: bool) -> StageReport | None:
    """Return what a scheduler reports with an output: the stages of the prompt, and all of them at the end."""
    if request.finish is None and not is_first:
        return None
    return StageReport(
        {"received": 5.0, "waiting": 5.0, "running": 5.25}, [Span(Stage.DECODE, 5.25, 5.5, {"first_step": 1})]
    )


def echo(message: GenerateRequest, request: Request) -> TokenOutput:
    """The next token of the request's echo."""
    is_first = len(request.output_ids) == request.num_given_tokens
    token_id = request.prompt_ids[len(request.output_ids) % len(request.prompt_ids)]
    request.append(token_id, None)
    start = message.logprob_start
    scored = None if start is None else [TokenLogprob(t, -0.25) for t in request.prompt_ids[max(start, 1) :]]
    # No two tokens have the same.
    logprob = -0.5 - len(request.output_ids)
    top = tuple((i, logprob - i) for i in range(message.num_top_logprobs))
    return TokenOutput(
        rid=request.rid,
        submission=message.submission,
        token_ids=[token_id],
        logprobs=[TokenLogprob(token_id, logprob, top)] if message.return_logprob else [],
        hidden_states=state_of(message, token_id, len(request.output_ids)),
        input_logprobs=scored if is_first else None,
        num_cached_tokens=3 + request.num_given_tokens,
        finish=request.finish,
        stages=stages_of(request, is_first=is_first),
        speculation=SpeculationStats(num_verify_steps=1, num_proposed_tokens=4, num_accepted_tokens=2),
    )


class SteppedScheduler:
    """A SchedulerPort that echoes in this process: one token of one sample at a time, nothing is ever merged."""

    failure = None
    info = READY

    def __init__(self) -> None:
        self.received: list[GenerateRequest] = []

    def submit(self, *requests: GenerateRequest, dp_rank: int | None = None) -> SteppedStream:
        self.received += requests
        return SteppedStream(requests)


class SteppedStream:
    def __init__(self, messages: Sequence[GenerateRequest]) -> None:
        self._open = {m.rid: (m, request_of(m)) for m in messages}
        self.last_sent_at = dict.fromkeys(self._open, 0.0)

    def __aiter__(self) -> SteppedStream:
        return self

    async def __anext__(self) -> TokenOutput:
        if not self._open:
            raise StopAsyncIteration
        # In turn, also where some are ahead already.
        rid = min(self._open, key=lambda rid: (len(self._open[rid][1].output_ids), rid))
        message, request = self._open.pop(rid)
        output = echo(message, request)
        if output.finish is None:
            self._open[rid] = message, request
        return output

    def drop(self, rid: str) -> None:
        self._open.pop(rid, None)

    def close(self) -> None:
        self._open.clear()


class EchoScheduler:
    """Answers token i of the output with token i (mod its length) of the prompt, one token of each request a step.

    `hold_after`: tokens a request gets before it stops until it is aborted; None: it runs to its end.
    `fail_with`: how requests end at once, before their first token.
    """

    def __init__(self, to_scheduler: str, from_scheduler: str) -> None:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.linger = 0
        self._to_scheduler = to_scheduler
        self._push.connect(from_scheduler)
        self._running: dict[str, Request] = {}
        self._messages: dict[str, GenerateRequest] = {}
        self._task: asyncio.Task[None] | None = None
        self.hold_after: int | None = None
        self.fail_with: FinishReason | None = None
        self.fail_after = 0
        self.ends_after_one = False
        self.speculation: SpeculationStats | None = None
        self.answers_calls = True
        self.kv_index = b"{}"
        self.steps = StepPage(ClockReading(1.0, 2.0), [])
        self.asked_steps: list[tuple[int | None, int]] = []
        # Steps towards another role, and why some cannot be done: error and status.
        self.role_steps: list[RoleStep] = []
        self.role_asked = asyncio.Event()
        self.role_errors: dict[RoleStep, tuple[str, int]] = {}
        self.ready = READY
        self.received: list[GenerateRequest] = []
        self.aborts: asyncio.Queue[AbortRequest] = asyncio.Queue()

    async def start(self, *, ready: bool = True) -> None:
        self.connect()
        if ready:
            await self.send(self.ready)
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pull.close()
        self._push.close()
        self._context.term()

    def connect(self) -> None:
        """Start to receive messages."""
        self._pull.connect(self._to_scheduler)

    async def send(self, message: FromScheduler) -> None:
        await self._push.send(encode(message))

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def _serve(self) -> None:
        while True:
            # With something to compute, only look; else wait for a message.
            while not self._steppable() or await self._pull.poll(0):
                await self._take(await self._pull.recv())
            outputs = [self._step(request) for request in self._steppable()]
            await self.send(StepOutputs(outputs=outputs, sent_at=time.monotonic()))

    def _steppable(self) -> list[Request]:
        return [r for r in self._running.values() if self.hold_after is None or len(r.output_ids) < self.hold_after]

    async def _take(self, frame: bytes) -> None:
        match decode_to_scheduler(frame):
            case GenerateRequest() as message:
                self.received.append(message)
                self._messages[message.rid] = message
                self._running[message.rid] = request_of(message)
            case AbortRequest() as abort:
                self._running.pop(abort.rid, None)
                if not abort.quiet:
                    finish = FinishReason(FinishType.ABORT, message=abort.message, status_code=499, reason="aborted")
                    submission = self._messages[abort.rid].submission
                    output = TokenOutput(rid=abort.rid, submission=submission, finish=finish)
                    await self.send(StepOutputs(outputs=[output]))
                self.aborts.put_nowait(abort)
            case StateRequest(call_id=call_id):
                if self.answers_calls:
                    await self.send(StateReply(call_id=call_id, state=self._state()))
            case RoleRequest(call_id=call_id, step=step):
                self.role_steps.append(step)
                self.role_asked.set()
                error, status = self.role_errors.get(step, ("", 200))
                if self.answers_calls:
                    await self.send(RoleReply(call_id=call_id, error=error, status_code=status))
            case MemoryRequest(call_id=call_id, step=memory_step):
                await self.send(RoleReply(call_id=call_id, model=f"after {memory_step}"))
            case KVIndexRequest(call_id=call_id):
                await self.send(KVIndexReply(call_id=call_id, snapshot=self.kv_index))
            case StepsRequest(call_id=call_id, since=since, limit=limit):
                self.asked_steps.append((since, limit))
                await self.send(StepsReply(call_id=call_id, page=self.steps))
            case FlushCacheRequest(call_id=call_id):
                if self.answers_calls:
                    await self.send(FlushCacheReply(call_id=call_id, num_pages_freed=7))

    def _state(self) -> SchedulerState:
        return SchedulerState(
            num_running_reqs=len(self._running),
            num_waiting_reqs=1,
            page_size=16,
            pages_total=64,
            pages_free=32,
            pages_cached=16,
            pages_leased=0,
            rows_total=8,
            rows_free=8,
            prefix_cache_queries=10,
            prefix_cache_hits=4,
            num_tokens_held=99,
            num_tokens_pre_allocated=48,
            num_transfer_failed_reqs_total=2,
            last_gen_throughput=12.5,
        )

    def _step(self, request: Request) -> TokenOutput:
        message = self._messages[request.rid]
        if self.fail_with is not None and len(request.output_ids) >= self.fail_after:
            del self._running[request.rid]
            return TokenOutput(rid=request.rid, submission=message.submission, finish=self.fail_with)
        is_first = len(request.output_ids) == request.num_given_tokens
        token_id = request.prompt_ids[len(request.output_ids) % len(request.prompt_ids)]
        request.append(token_id, None)
        if self.ends_after_one:
            request.finish = FinishReason(FinishType.LENGTH)
        if request.finish is not None:
            del self._running[request.rid]
        start = message.logprob_start
        scored = None if start is None else [TokenLogprob(t, -0.25) for t in request.prompt_ids[max(start, 1) :]]
        top = tuple((i, -1.0 - i) for i in range(message.num_top_logprobs))
        return TokenOutput(
            rid=request.rid,
            submission=message.submission,
            token_ids=[token_id],
            logprobs=[TokenLogprob(token_id, -0.5, top)] if message.return_logprob else [],
            hidden_states=state_of(message, token_id, len(request.output_ids)),
            input_logprobs=scored if is_first else None,
            num_cached_tokens=3,
            finish=request.finish,
            stages=stages_of(request, is_first=is_first),
            transfer=TransferStats(num_bytes=2 * 10**9, seconds=0.5, exposed_seconds=0.1)
            if self.ends_after_one
            else None,
            speculation=self.speculation,
        )
