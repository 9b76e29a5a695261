"""`Engine`: a model inside a Python program, used by calls instead of HTTP.

Life cycle of an Engine:
1. It starts one scheduler process, or with `prefill` and `decode` a whole cluster on this machine. The model is loaded
   when the constructor returns.
2. Every call is an OfflineRun in an event loop that the engine runs in its own thread; the caller's thread or task
   waits.
3. A call that is interrupted (Ctrl-C, a cancelled task, a closed stream) aborts its requests in flight.
4. `close`, the end of the `with` block or of the program: running requests are aborted, and no process or thread is
   left.

Calls may come from any thread and any event loop, several at a time.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, overload

import msgspec

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, InvalidRequestError, did_you_mean
from splitserve.core.options import fill, flag_of, replaced
from splitserve.core.parallel import WorkerShape
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.offline.backends import EngineBackend, RouterBackend, SchedulerBackend
from splitserve.offline.calls import Chunk, Output, Prompt, Sampling, SamplingParams, is_single, requests_for
from splitserve.offline.memory import MemoryCalls
from splitserve.offline.runs import Bridge, End, OfflineRun, console_for, progress_bar
from splitserve.offline.terms import ENGINE_OPTIONS, engine_terms, python_words
from splitserve.worker.checks import check_worker
from splitserve.worker.preflight import check_preflight

Prompts = Prompt | Sequence[Prompt]
SamplingArgument = Sampling | Sequence[Sampling]


class _DefaultModel(str):
    """Marks an absent argument, because a caller may also pass this name."""

    __slots__ = ()


_DEFAULT_MODEL = _DefaultModel("smollm2")
# Arguments of an Engine that are not options of workers.
_ARGUMENTS = ("model", "prefill", "decode", "transfer_backend", "hand_over", "progress", "load_timeout")
_PAIR_ONLY = "applies to the KV transfer between prefill and decode workers: give prefill=1 and decode=1, too"
# Names of vLLM and SGLang -> options of an engine.
_OTHER_NAMES = {
    alias.removeprefix("--").replace("-", "_"): option.name
    for option in ENGINE_OPTIONS.values()
    for alias in option.aliases.split()
}


class CallOptions(TypedDict, total=False):
    # Likeliest tokens to score per generated token; 0: only the generated one. None: no logprobs.
    logprobs: int | None
    # Whether to return the hidden state that each token was sampled from. The engine needs enable_return_hidden_states.
    hidden_states: bool
    # Seconds for the whole call; unfinished prompts then fail with DeadlineExceededError. None: no deadline.
    deadline: float | None


class Engine(MemoryCalls):
    """Model that this program can call; smollm2 by default.

    `prefill`, `decode`: workers of each kind; both 0: one process for both roles. `transfer_backend` (tcp by default)
    and `hand_over`: KV transfer between them. `progress`: show loading and batches on standard error, if that is a
    terminal. `options`: options of `splitserve serve` about model, ranks, KV cache, scheduling and speculative
    decoding, by their Python names, for every worker (docs/reference/options.md). The names of vLLM and SGLang are
    accepted, too, such as `model_path`.

    Raises ConfigError, ModelLoadError, ClusterError.
    """

    @engine_terms()
    def __init__(
        self,
        model: str = _DEFAULT_MODEL,
        *,
        prefill: int = 0,
        decode: int = 0,
        transfer_backend: str | None = None,
        hand_over: bool = False,
        progress: bool = True,
        load_timeout: float = 900.0,
        **options: Any,
    ) -> None:
        _converted("prefill", prefill, int)
        _converted("decode", decode, int)
        _converted("load_timeout", load_timeout, float)
        if min(prefill, decode) < 0 or bool(prefill) != bool(decode):
            raise ConfigError(f"prefill={prefill}, decode={decode}: give both at least 1, or neither for one process")
        for name, value in (("hand_over", hand_over), ("transfer_backend", transfer_backend)):
            if value and not prefill:
                raise ConfigError(f"{name} {_PAIR_ONLY}")
        transfer_backend = transfer_backend or "tcp"
        if model is _DEFAULT_MODEL:
            model = options.pop("model_path", str(_DEFAULT_MODEL))
        elif "model_path" in options:
            other = options["model_path"]
            raise ConfigError(f"Engine's option model is given twice: as {model!r}, and as model_path {other!r}")
        given = {_OTHER_NAMES.get(name, name): name for name in options}
        options = own_names(options)
        with engine_terms(given):
            config = worker_config(model, transfer_backend, options)
            folder = resolve_model(model, progress=progress)
            check_preflight(config, folder)
        tokenizer = Tokenizer.load(folder)
        self._progress = progress
        self._num_places = min(config.scheduler.max_running_requests, config.scheduler.max_queued_requests)
        self._places = asyncio.Semaphore(self._num_places)
        console = console_for(progress=progress)
        with ExitStack() as closing:
            if prefill:
                cluster = _cluster(model, prefill, decode, transfer_backend, hand_over, options)
                closing.enter_context(cluster).wait_ready(load_timeout, console)
                self._backend: EngineBackend = RouterBackend(cluster.router_url, tokenizer)
            else:
                self._backend = SchedulerBackend(config, folder, tokenizer, load_timeout)
            self._bridge = Bridge()
            closing.callback(self._bridge.close, self._backend)
            with console.status(f"loading {model}"):
                self._bridge.wait(self._backend.open())
            self._closing = closing.pop_all()
        atexit.register(self.close)

    # A text is also a sequence of texts; the first overload is meant for it.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> Output: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> list[Output]: ...

    def generate(
        self, prompts: Prompts, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> Output | list[Output]:
        """Return one prompt's output, or those of a list in its order. `sampling_params`: for all, or one per prompt.

        The failure of a single prompt is raised unchanged. For a list, BatchError is raised when all have ended and
        some failed.
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
        self, prompts: Prompts, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> Output | list[Output]:
        """Run `generate` in a coroutine. Cancelling it aborts its requests."""
        with progress_bar(_num_prompts(prompts), progress=self._progress) as on_end:
            run = self._run(prompts, sampling_params, call, on_end=on_end)
            try:
                outputs = await self._bridge.wait_async(run.finish(), run)
            finally:
                await self._bridge.end_async(run)
        return outputs[0] if is_single(prompts) else outputs

    def stream(
        self, prompts: Prompts, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> Generator[Chunk, None, None]:
        """Yield increments of the outputs. Errors as for `generate`.

        Increments of a list come in order of arrival, with their `index`. Nothing is sent before the first chunk is
        requested. Closing or dropping the generator aborts the rest.
        """
        return self._chunks(self._run(prompts, sampling_params, call, stream=True))

    def astream(
        self, prompts: Prompts, sampling_params: SamplingArgument = None, **call: Unpack[CallOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Run `stream` in a coroutine. If left early, closing it aborts the rest: see contextlib.aclosing."""
        return self._achunks(self._run(prompts, sampling_params, call, stream=True))

    def close(self) -> None:
        """Abort running requests, which fail with WorkerUnavailableError; end every process and thread. Idempotent."""
        atexit.unregister(self.close)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @engine_terms()
    def _run(
        self,
        prompts: Prompts,
        sampling: SamplingArgument,
        call: CallOptions,
        *,
        stream: bool = False,
        on_end: Callable[[End], None] = lambda _: None,
    ) -> OfflineRun:
        _check_call(call)
        return OfflineRun(
            requests_for(prompts, sampling, call.get("logprobs"), hidden_states=call.get("hidden_states", False)),
            self._backend,
            self._places,
            stream=stream,
            is_single=is_single(prompts),
            deadline=call.get("deadline"),
            num_runners=self._num_places,
            on_end=on_end,
        )

    def _chunks(self, run: OfflineRun) -> Generator[Chunk, None, None]:
        try:
            while (chunk := self._bridge.wait(run.next(), run)) is not None:
                yield chunk
        finally:
            self._bridge.end(run)

    async def _achunks(self, run: OfflineRun) -> AsyncGenerator[Chunk, None]:
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


def _check_call(call: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for an argument that no call has, or a deadline that is no time."""
    known = CallOptions.__annotations__
    for name in [name for name in call if name not in known]:
        if name == "n":
            hint = "give the prompt several times, with a seed each"
        elif name in SamplingParams.model_fields:
            hint = "give it in sampling_params"
        else:
            there_are = f"there are {', '.join(known)}"
            near = did_you_mean(name, SamplingParams.model_fields, there_are, form="{} in sampling_params")
            hint = did_you_mean(name, known, near)
        raise InvalidRequestError(f"a call has no argument {name}: {hint}", param=name)
    deadline = call.get("deadline")
    if deadline is not None and not (isinstance(deadline, int | float) and deadline > 0):
        raise InvalidRequestError(f"deadline is {deadline!r}: give a number of seconds above 0", param="deadline")


def _num_prompts(prompts: Prompts) -> int:
    return 1 if is_single(prompts) else len(prompts)


def worker_config(model: str, transfer_backend: str, options: Mapping[str, Any]) -> WorkerConfig:
    """Return the config of a worker in the null role. Raises ConfigError that names the invalid option."""
    values = {name: _checked(name, value) for name, value in options.items()}
    changes = {"model.model": model, "disaggregation.transfer_backend": transfer_backend}
    config: WorkerConfig = replaced(fill(WorkerConfig(), values), changes)
    check_worker(config)
    return config


def own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their names here. Raises ConfigError for an unknown name, or an option that is given twice."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        own = _OTHER_NAMES.get(name, name)
        if own not in ENGINE_OPTIONS:
            if own in SamplingParams.model_fields:
                hint = "give it in the sampling_params of a call"
            else:
                near = did_you_mean(name, [*ENGINE_OPTIONS, *_OTHER_NAMES, *_ARGUMENTS])
                hint = f"{near} docs/reference/options.md lists its options".lstrip()
            raise ConfigError(f"Engine has no option {name!r}; {hint}")
        if own in found:
            other = next(n for n in options if n != name and _OTHER_NAMES.get(n, n) == own)
            raise ConfigError(f"Engine's option {own} is given twice: as {other} and as {name}")
        found[own] = value
    return found


def worker_args(options: Mapping[str, Any]) -> list[str]:
    """Return the same options for the command line of a worker. None: the worker's default."""
    args = []
    for name, value in options.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            is_default = value == ENGINE_OPTIONS[name].default
            args += [] if is_default else [flag if value else f"--no-{flag[2:]}"]
        elif value is not None:
            args.append(f"{flag}={value}")
    return args


def _checked(name: str, value: Any) -> Any:
    option = ENGINE_OPTIONS[name]
    return _converted(name, option.check(value), option.kind)


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Engine's option {name}: {python_words(str(error))}") from None
