"""`Engine`: a model that a Python program holds, asked by calls instead of HTTP.

The life of an Engine
1. It starts what serves: one scheduler process, or with `prefill` and `decode` a whole cluster on this machine. The
   model is loaded when the constructor returns.
2. Every call is a Run in an event loop that the engine has in a thread of its own; the caller's thread or task waits.
3. A call that is interrupted (Ctrl-C, a cancelled task, a stream that is closed) aborts what it has under way.
4. `close`, the end of the `with` block or of the program: what runs is aborted, and no process or thread is left.

Calls may come from any thread and any event loop, several at a time.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, overload

from splitserve.cluster.deployment import LocalDeployment
from splitserve.engine.sources import resolve_model
from splitserve.errors import ConfigError
from splitserve.launch.fit import check_worker_fit
from splitserve.launch.local import LocalCluster, wait_ready
from splitserve.launch.shape import WorkerShape
from splitserve.offline.backends import Backend, RouterBackend, SchedulerBackend
from splitserve.offline.bridge import Bridge
from splitserve.offline.options import EngineOptions, worker_args, worker_config
from splitserve.offline.outputs import Chunk, Output
from splitserve.offline.progress import console_for, progress_bar
from splitserve.offline.requests import Prompt, Sampling, is_single, requests_for
from splitserve.offline.runs import End, Run
from splitserve.server.tokenizer import Tokenizer

SamplingArgument = Sampling | Sequence[Sampling]


class CallOptions(TypedDict, total=False):
    # Likeliest tokens to score beside each generated token, 0: only that one. None: no logprobs.
    logprobs: int | None
    # Seconds for the whole call, after which what is not done fails with DeadlineExceededError. None: none.
    deadline: float | None


class Engine:
    """`prefill`, `decode`: workers of each kind; both 0: one process does both. `transfer_backend` and `hand_over` are
    between them. `progress`: show loading and batches on standard error, where that is a terminal.

    Raises ConfigError, ModelLoadError, ClusterError.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prefill: int = 0,
        decode: int = 0,
        transfer_backend: str = "tcp",
        hand_over: bool = False,
        progress: bool = True,
        load_timeout: float = 900.0,
        **options: Unpack[EngineOptions],
    ) -> None:
        if hand_over and prefill == 0:
            raise ConfigError("hand_over is between prefill and decode workers: give prefill=1 and decode=1, too")
        config = worker_config(model, transfer_backend, options)
        folder = resolve_model(model, progress=progress)
        check_worker_fit(config, folder)
        tokenizer = Tokenizer.load(folder)
        self._progress = progress
        self._num_places = min(config.scheduler.max_running_requests, config.scheduler.max_queued_requests)
        self._places = asyncio.Semaphore(self._num_places)
        console = console_for(progress=progress)
        with ExitStack() as closing:
            if prefill or decode:
                cluster = _cluster(model, prefill, decode, transfer_backend, hand_over, options)
                wait_ready(closing.enter_context(cluster), console, load_timeout)
                self._backend: Backend = RouterBackend(cluster.router_url, tokenizer)
            else:
                self._backend = SchedulerBackend(config, folder, tokenizer, load_timeout)
            self._bridge = Bridge()
            closing.callback(self._bridge.close, self._backend)
            with console.status(f"loading {model}"):
                self._bridge.wait(self._backend.open())
            self._closing = closing.pop_all()
        atexit.register(self.close)

    # A text is a sequence of texts, too: the first overload is meant for it.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> Output: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        **call: Unpack[CallOptions],
    ) -> Output | list[Output]:
        """One prompt's answer, or those of a list in its order. `sampling_params`: for all, or one a prompt.

        One prompt's failure is raised as it is; BatchError, when all of a list have ended and some failed.
        """
        with progress_bar(_num_prompts(prompts), progress=self._progress) as on_end:
            run = self._run(prompts, sampling_params, call, on_end=on_end)
            try:
                outputs = self._bridge.wait(run.finish(), run)
            finally:
                self._bridge.end(run)
        return outputs[0] if is_single(prompts) else outputs

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> Output: ...

    @overload
    async def agenerate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> list[Output]: ...

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        **call: Unpack[CallOptions],
    ) -> Output | list[Output]:
        """`generate` for a coroutine. Cancelling it aborts what it asked for."""
        with progress_bar(_num_prompts(prompts), progress=self._progress) as on_end:
            run = self._run(prompts, sampling_params, call, on_end=on_end)
            try:
                outputs = await self._bridge.wait_async(run.finish(), run)
            finally:
                await self._bridge.end_async(run)
        return outputs[0] if is_single(prompts) else outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        **call: Unpack[CallOptions],
    ) -> Generator[Chunk, None, None]:
        """Answers as they grow; those of a list as they come, told apart by `index`. Errors as of `generate`.

        Nothing is asked before the first chunk is. Closing the generator, or dropping it, aborts the rest.
        """
        return self._chunks(self._run(prompts, sampling_params, call, stream=True))

    def astream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        **call: Unpack[CallOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for a coroutine. Left early, it aborts the rest when it is closed: see contextlib.aclosing."""
        return self._achunks(self._run(prompts, sampling_params, call, stream=True))

    def close(self) -> None:
        """Abort what runs, which fails with WorkerUnavailableError; end every process and thread. Idempotent."""
        atexit.unregister(self.close)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingArgument,
        call: CallOptions,
        *,
        stream: bool = False,
        on_end: Callable[[End], None] = lambda _: None,
    ) -> Run:
        return Run(
            requests_for(prompts, sampling, call.get("logprobs")),
            self._backend,
            self._places,
            stream=stream,
            is_single=is_single(prompts),
            deadline=call.get("deadline"),
            num_runners=self._num_places,
            on_end=on_end,
        )

    def _chunks(self, run: Run) -> Generator[Chunk, None, None]:
        try:
            while (chunk := self._bridge.wait(run.next(), run)) is not None:
                yield chunk
        finally:
            self._bridge.end(run)

    async def _achunks(self, run: Run) -> AsyncGenerator[Chunk, None]:
        try:
            while (chunk := await self._bridge.wait_async(run.next(), run)) is not None:
                yield chunk
        finally:
            await self._bridge.end_async(run)


def _cluster(
    model: str, prefill: int, decode: int, backend: str, hand_over: bool, options: Mapping[str, Any]
) -> LocalCluster:
    rest = dict(options)
    shape = WorkerShape(rest.pop("tp_size", 1), rest.pop("pp_size", 1), rest.pop("dp_size", 1))
    return LocalCluster(
        LocalDeployment(
            model=model,
            prefill=prefill,
            decode=decode,
            prefill_shape=shape,
            decode_shape=shape,
            backend=backend,
            hand_over=hand_over,
            dtype=rest.pop("dtype", "auto"),
            threads=rest.pop("threads", None),
            worker_args=worker_args(rest),
            log_level="warning",
        )
    )


def _num_prompts(prompts: Prompt | Sequence[Prompt]) -> int:
    return 1 if is_single(prompts) else len(prompts)
