"""Prompts of one call in flight, their results and progress, and the bridge to the thread in which they live.

Life cycle of an OfflineRun, in the engine's event loop:
1. The first `next` starts runners, which process the prompts in order. Each prompt waits for one of the engine's
   slots.
2. Each answer of the backend contains all output so far, so only the latest is kept per prompt. A slow caller gets
   several answers as one chunk, and no runner waits for it.
3. A prompt that fails, or misses the call's deadline, ends alone; the error is raised when all have ended.
4. `close` or `stop` aborts running prompts.

The bridge runs coroutines in the engine's loop for a caller's thread or loop. A wait that is interrupted or cancelled
cancels the coroutine. A run is registered from its first wait to its `end`, so that `close` can stop it. After `close`
no coroutine is run: waits raise, and `end` does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from splitserve.core.errors import DeadlineExceededError, SplitserveError, WorkerUnavailableError
from splitserve.offline.backends import EngineBackend
from splitserve.offline.calls import BatchError, Chunk, Output, PromptRequest
from splitserve.offline.terms import in_engine_terms
from splitserve.process.threads import LoopThread, end_tasks

logger = logging.getLogger(__name__)

# Result of a prompt.
End = Output | SplitserveError


@dataclass(eq=False)
class OfflineRun:
    """Run of one call's prompts."""

    requests: Sequence[PromptRequest]
    backend: EngineBackend
    # Slots for requests of the whole engine.
    places: asyncio.Semaphore
    _: KW_ONLY
    stream: bool = False
    # Whether a failure of the only prompt is raised unchanged, not as a BatchError.
    is_single: bool = False
    # Seconds for all prompts together. None: no deadline.
    deadline: float | None = None
    num_runners: int = 1
    # Receives each prompt's result.
    on_end: Callable[[End], None] = lambda _: None
    _runners: list[asyncio.Task[None]] = field(init=False, default_factory=list)
    # Index -> latest native answer or failure that the caller has not received; longest waiting first.
    _news: dict[int, Mapping[str, Any] | SplitserveError] = field(init=False, default_factory=dict)
    _arrived: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    # Index -> characters and tokens that the caller has received.
    _seen: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)
    _outputs: dict[int, Output] = field(init=False, default_factory=dict)
    _errors: dict[int, SplitserveError] = field(init=False, default_factory=dict)
    _stopped: SplitserveError | None = field(init=False, default=None)

    async def next(self) -> Chunk | None:
        """Return the next increment of some prompt. None: all have ended. Raises BatchError then if some failed."""
        if not self._runners:
            ends_at = None if self.deadline is None else asyncio.get_running_loop().time() + self.deadline
            waiting = iter(self.requests)
            count = min(len(self.requests), self.num_runners)
            self._runners = [asyncio.create_task(self._work(waiting, ends_at)) for _ in range(count)]
        while True:
            if self._stopped is not None:
                raise self._stopped
            while self._news:
                index = next(iter(self._news))
                news = self._news.pop(index)
                if not isinstance(news, SplitserveError):
                    return self._chunk(index, Output.of(news))
                self._errors[index] = news
                self.on_end(news)
            if len(self._outputs) + len(self._errors) == len(self.requests):
                if self._errors and self.is_single:
                    raise self._errors[0]
                if self._errors:
                    raise BatchError([self._outputs.get(r.index) for r in self.requests], self._errors)
                return None
            # Every runner has deadlines of its own, so an answer or error arrives.
            self._arrived.clear()
            await self._arrived.wait()

    async def finish(self) -> list[Output]:
        """Return all answers, in the order of the prompts. Raises BatchError if some failed."""
        while await self.next() is not None:
            pass
        return [self._outputs[r.index] for r in self.requests]

    async def stop(self, error: SplitserveError) -> None:
        """Abort running prompts; waiting callers get `error`."""
        self._stopped = self._stopped or error
        self._arrived.set()
        await self.close()

    async def close(self) -> None:
        """Abort running prompts. Idempotent; none is in flight when it returns."""
        await end_tasks(self._runners)

    async def _work(self, waiting: Iterator[PromptRequest], ends_at: float | None) -> None:
        for request in waiting:
            try:
                async with asyncio.timeout_at(ends_at), self.places:
                    # A deadline that has already passed ends it here, before anything is sent.
                    await asyncio.sleep(0)
                    await self._ask(request)
            except SplitserveError as error:
                self._put(request, error)
            except TimeoutError:
                late = f"request {request.rid}: not done within the call's {self.deadline:g} s (stage: generation)"
                remedy = "it was aborted: give the call a longer deadline"
                self._put(request, DeadlineExceededError(f"{late}; {remedy}"))
            except Exception as error:
                logger.exception("request %s failed", request.rid)
                self._put(request, SplitserveError(f"request {request.rid}: {type(error).__name__}: {error}"))

    async def _ask(self, request: PromptRequest) -> None:
        has_ended = False
        states: list[tuple[float, ...]] = []
        body = request.body(self.backend.tokenizer, stream=self.stream)
        async with aclosing(self.backend.answers(body)) as answers:
            async for answer in answers:
                meta = answer["meta_info"]
                has_ended = meta["finish_reason"] is not None
                if request.return_hidden_states:
                    # An answer of a stream has the states of its new tokens only.
                    states += map(tuple, meta["hidden_states"])
                    meta["hidden_states"] = tuple(states)
                self._put(request, answer)
        if not has_ended:
            raise WorkerUnavailableError(f"request {request.rid}: its answer broke off before its end: call again")

    def _put(self, request: PromptRequest, news: Mapping[str, Any] | SplitserveError) -> None:
        if isinstance(news, SplitserveError):
            in_engine_terms(news)
        self._news[request.index] = news
        self._arrived.set()

    def _chunk(self, index: int, output: Output) -> Chunk:
        num_chars, num_tokens = self._seen.get(index, (0, 0))
        self._seen[index] = len(output.text), len(output.token_ids)
        has_ended = bool(output.finish_reason)
        if has_ended:
            self._outputs[index] = output
            self.on_end(output)
        return Chunk(
            text=output.text[num_chars:],
            token_ids=output.token_ids[num_tokens:],
            logprobs=output.logprobs[num_tokens:],
            hidden_states=output.hidden_states[num_tokens:],
            index=index,
            output=output if has_ended else None,
        )


def console_for(*, progress: bool) -> Console:
    console = Console(emoji=False, stderr=True)
    console.quiet = not (progress and console.is_terminal)
    return console


@contextmanager
def progress_bar(num_prompts: int, *, progress: bool) -> Iterator[Callable[[Output | SplitserveError], None]]:
    """Yield the function to call at the end of each prompt, from any thread. A single prompt gets no bar."""
    console = console_for(progress=progress)
    if console.quiet or num_prompts < 2:
        yield lambda _: None
        return
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=num_prompts, tokens=0, failed=0)

        def on_end(end: Output | SplitserveError) -> None:
            fields = bar.tasks[0].fields
            if isinstance(end, Output):
                bar.update(task, advance=1, tokens=fields["tokens"] + len(end.token_ids))
            else:
                bar.update(task, advance=1, failed=fields["failed"] + 1)

        yield on_end


T = TypeVar("T")


class Bridge:
    def __init__(self) -> None:
        self._loop = LoopThread("splitserve-engine")
        # Guards the two below: a submitter always finds the loop running.
        self._lock = threading.Lock()
        self._closed = False
        self._runs: set[OfflineRun] = set()

    def wait(self, work: Coroutine[Any, Any, T], run: OfflineRun | None = None) -> T:
        """Run `work` and return its result. An interrupt (Ctrl-C) cancels `work`.

        Raises WorkerUnavailableError when closed.
        """
        future = self._submit(work, run)
        try:
            return future.result()
        except CancelledError:
            raise _closed_error() from None
        except BaseException:
            future.cancel()
            raise

    async def wait_async(self, work: Coroutine[Any, Any, T], run: OfflineRun | None = None) -> T:
        """Run `work` for a coroutine of another loop. Otherwise like `wait`."""
        return await asyncio.wrap_future(self._submit(work, run))

    def end(self, run: OfflineRun) -> None:
        """Abort the rest of a run; return when that is done."""
        if self._forget(run):
            self.wait(run.close())

    async def end_async(self, run: OfflineRun) -> None:
        if self._forget(run):
            await self.wait_async(run.close())

    def close(self, backend: EngineBackend) -> None:
        """Stop every run and the backend, then the loop. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            runs = list(self._runs)

        async def stop() -> None:
            for run in runs:
                await run.stop(_closed_error())
            await backend.close()

        try:
            self._loop.submit(stop()).result()
        finally:
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T], run: OfflineRun | None) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise _closed_error()
            if run is not None:
                self._runs.add(run)
            return self._loop.submit(work)

    def _forget(self, run: OfflineRun) -> bool:
        """Forget a run. Return whether it still has to be ended; `close` has ended all."""
        with self._lock:
            self._runs.discard(run)
            return not self._closed


def _closed_error() -> WorkerUnavailableError:
    return WorkerUnavailableError("this engine is closed, and whatever it ran was aborted: open another")
