"""Release of a worker's memory and updates of its weights, with all its schedulers.

1. Running requests block a change, unless the operator lets them end or aborts them. During a change the worker accepts
   no requests, and it leaves its router.
2. An update loads the new weights while running requests end. A failure here has no effect on them. If several ranks
   compute the model, they load when requests have ended.
3. The schedulers wait until nothing is held. Then they all release memory, or all use the new weights. Their roles are
   opened anew, so that peers pair again (`scheduler/memory.py`).
4. The worker registers again when nothing is released any more.

If only some schedulers of a worker use the new weights, `broken` is set, and the worker ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any

from splitserve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    MemoryBlockedError,
    ModelLoadError,
    SplitserveError,
    WorkerDrainingError,
    WorkerUnavailableError,
)
from splitserve.core.groups import group_of
from splitserve.core.memory import MEMORY_RELEASED, MemoryTag, WeightsSource
from splitserve.core.request import DisaggregationMode
from splitserve.engine.weights_source import check_source
from splitserve.process.threads import end_tasks
from splitserve.server.front_end import FrontEnd
from splitserve.server.memory import RunningRequests
from splitserve.server.scheduler_group import HalfSwitchedError, SchedulerGroup
from splitserve.worker.exclusions import memory_obstacle
from splitserve.worker.registration import RouterRegistration
from splitserve.worker.role_switch import OwnBootstrap

logger = logging.getLogger(__name__)

_CHANGING = "this worker is changing its memory or weights and takes no new requests: send it to another"
_BROKEN_OFF = "the prefill worker changes its memory or weights and ended the request: send it again"
_ABORTED = "aborted, because this worker changes its memory or weights"


class WorkerMemory:
    """MemoryControl of one worker. `broken`: set with the reason if the worker must end."""

    def __init__(
        self,
        front: FrontEnd,
        schedulers: SchedulerGroup,
        bootstrap: OwnBootstrap,
        registration: RouterRegistration,
        broken: asyncio.Future[str],
    ) -> None:
        self._front = front
        self._schedulers = schedulers
        self._bootstrap = bootstrap
        self._registration = registration
        self._broken = broken
        self._task: asyncio.Task[None] | None = None
        self._released: frozenset[MemoryTag] = frozenset()
        self._is_closed = False

    @property
    def released(self) -> frozenset[MemoryTag]:
        return self._released

    async def release(self, tags: Collection[MemoryTag], running: RunningRequests) -> None:
        is_on_cpu = self._front.info.device == "cpu"
        if MemoryTag.KV_CACHE in tags and not (is_on_cpu or self._front.config.cache.enable_memory_saver):
            raise InvalidRequestError(
                "the KV pool on a GPU is releasable only with --enable-memory-saver: restart the worker with it, or "
                "release weights only",
                param="tags",
            )
        await self._change(partial(self._release, frozenset(tags), running), running)

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        self._check_no_change()
        if self._released:
            await self._change(partial(self._resume, frozenset(tags)))

    async def update(self, source: WeightsSource, running: RunningRequests) -> None:
        # Before the check of running requests, which would hide the error.
        try:
            await asyncio.to_thread(check_source, source, self._front.info.quantization)
        except (ConfigError, ModelLoadError) as error:
            param = "name" if source.is_shared_memory else "model_path"
            raise InvalidRequestError(error.message, param=param) from error
        await self._change(partial(self._update, source, running), running)

    async def close(self) -> None:
        """Cancel a change in progress, because the worker ends. Idempotent."""
        self._is_closed = True
        if self._task is not None:
            await end_tasks((self._task,))

    async def _change(
        self, change: Callable[[], Coroutine[Any, Any, None]], running: RunningRequests | None = None
    ) -> None:
        """Run a change to its end, even if the caller is cancelled."""
        self._check(running)
        # Without an await before this: no other request or change can come between.
        self._front.requests.drain(self._reason(), has_released=bool(self._released))
        self._task = asyncio.create_task(change(), name="memory")
        # The caller gets its error, or has left.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise WorkerUnavailableError(
                "this worker ends, because its scheduler was lost or it was stopped; see its log. Its memory and "
                "weights are gone: start it again"
            ) from None

    def _check(self, running: RunningRequests | None) -> None:
        front = self._front
        if (obstacle := memory_obstacle(front.config)) is not None:
            raise InvalidRequestError(f"a change of memory or weights {obstacle}")
        self._check_no_change()
        if self._released:
            return
        if front.requests.is_draining:
            raise MemoryBlockedError("this worker is shutting down: use another one")
        if (reason := front.unready_reason()) is not None:
            raise WorkerUnavailableError(reason)
        num_open = len(front.requests.rids - front.requests.probes)
        if running is not None and num_open and not (running.abort or running.drain):
            raise MemoryBlockedError(
                f"requests are running on this worker ({num_open}): wait for their ends, or send drain: true to wait "
                "for them here, or abort: true to end them"
            )

    def _check_no_change(self) -> None:
        is_busy = self._task is not None and not self._task.done()
        if is_busy or self._is_closed or self._front.switching_to is not None:
            raise MemoryBlockedError(
                "another change of the memory, weights or role of this worker is in progress: wait for its end"
            )

    async def _release(self, tags: frozenset[MemoryTag], running: RunningRequests) -> None:
        if not self._released:
            try:
                await self._registration.leave(MEMORY_RELEASED)
                await self._rest(running)
            except BaseException:
                await self._go_back()
                raise
            if self._front.mode is DisaggregationMode.PREFILL:
                await asyncio.to_thread(self._bootstrap.retire)
        self._set_released(self._released | tags)
        await self._schedulers.release_memory(tags)
        logger.info("memory released tags=%s", ",".join(sorted(self._released)))

    async def _resume(self, tags: frozenset[MemoryTag]) -> None:
        left = self._released - tags
        url = None if left else await self._bootstrap_url()
        # After a failure the bootstrap server keeps the registrations of schedulers that have resumed: they do not
        # register again when the others resume. No router sends requests meanwhile.
        await self._schedulers.resume_memory(tags, url, self._front.config.model.load_timeout)
        logger.info("memory resumed tags=%s", ",".join(sorted(self._released & tags)))
        self._set_released(left)
        self._serve()

    async def _update(self, source: WeightsSource, running: RunningRequests) -> None:
        left, began = self._released - {MemoryTag.WEIGHTS}, time.monotonic()
        try:
            if not self._released:
                await self._registration.leave("its weights are being replaced")
            if self._has_group:
                await self._rest_unless_released(running)
            await self._load(source)
            if not self._has_group:
                await self._rest_unless_released(running)
            await self._schedulers.use_weights(None if left else await self._bootstrap_url())
        except HalfSwitchedError as error:
            self._broken.set_result(error.message)
            raise
        except BaseException as error:
            logger.warning("the update of weights failed, the old ones stay in use: %s", error or type(error).__name__)
            await self._discard()
            raise
        if not source.is_shared_memory:
            self._front.weights_path = source.name
        logger.info("weights updated source=%s seconds=%.1f", source.name, time.monotonic() - began)
        self._set_released(left)
        self._serve()

    @property
    def _has_group(self) -> bool:
        """Whether several ranks compute the model. Their load is a collective, as a step is."""
        config = self._front.config
        return group_of(config).group_size > 1 or config.model.dp_attention

    async def _load(self, source: WeightsSource) -> None:
        """Load weights. Raises DeadlineExceededError, or HalfSwitchedError if some ranks of a group may still load."""
        # Ranks load the model and its draft, each with a timeout of its own.
        timeout = self._front.config.model.load_timeout * (2 if self._has_group else 1)
        try:
            await self._schedulers.load_weights(source, timeout)
        except DeadlineExceededError as error:
            if self._has_group:
                text = f"not all ranks loaded the weights within {timeout:g} s: {error.message}"
                raise HalfSwitchedError(text) from error
            raise DeadlineExceededError(
                f"weights {source.name} were not loaded within {timeout:g} s (stage: loading; --load-timeout). The old "
                "ones stay in use. The load continues, and its weights are dropped when it ends: then try again"
            ) from error

    async def _rest_unless_released(self, running: RunningRequests) -> None:
        if not self._released:
            await self._rest(running)

    async def _rest(self, running: RunningRequests) -> None:
        """Wait until nothing runs, and let the schedulers accept nothing more. Raises DeadlineExceededError."""
        deadline, requests = time.monotonic() + running.timeout, self._front.requests
        if running.abort and self._front.mode is DisaggregationMode.PREFILL:
            # An abort would reach the client from the decode worker, which would seem to be at fault.
            self._schedulers.break_off(WorkerDrainingError(_BROKEN_OFF))
        elif running.abort:
            requests.ordered_to_end.update(requests.rids)
            for rid in tuple(requests.rids):
                self._schedulers.abort(rid, _ABORTED)
        if not await requests.wait_idle(running.timeout):
            raise DeadlineExceededError(
                f"requests were still running ({requests.num_open_samples}) after {running.timeout:g} s (stage: "
                "draining): give a longer timeout, or send abort: true"
            )
        await self._schedulers.hold(max(0.0, deadline - time.monotonic()))

    async def _bootstrap_url(self) -> str | None:
        if self._front.mode is not DisaggregationMode.PREFILL:
            return None
        return await self._bootstrap.open(None)

    async def _discard(self) -> None:
        try:
            await self._schedulers.discard_weights()
        except SplitserveError as error:
            logger.error("loaded weights could not be dropped: %s", error.message)
        if not self._released:
            await self._go_back()

    async def _go_back(self) -> None:
        try:
            await self._schedulers.cancel_role()
        except SplitserveError as error:
            # A scheduler may be dead; then its end ends the worker. /health_generate detects a silent one.
            logger.error("the schedulers could not resume after a failed change of memory: %s", error.message)
        self._serve()

    def _set_released(self, tags: frozenset[MemoryTag]) -> None:
        self._released = tags
        self._front.requests.drain(self._reason(), has_released=bool(self._released))

    def _reason(self) -> str:
        if not self._released:
            return _CHANGING
        names = " and ".join(sorted(self._released))
        return (
            f"this worker has released its memory ({names}): POST /resume_memory_occupation to it, or send the "
            "request to another worker"
        )

    def _serve(self) -> None:
        if not self._is_closed and not self._released:
            self._front.requests.is_draining = False
            self._registration.enter(self._front.mode, self._bootstrap.port)
