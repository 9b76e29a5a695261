"""All schedulers of one worker for its routes: one SchedulerClient per data parallel rank.

1. Each sample of a request goes to one rank. On a prefill worker its room determines the rank, because the decode
   worker expects it there. Otherwise it is the rank with the fewest outstanding tokens.
2. The outputs of all samples arrive in one stream, whatever their ranks.
3. Flushing, snapshots and aborts go to every rank. If one fails, the worker fails.

The ranks share no collective, so an idle rank takes no part in the steps of others. This module does not know
processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from splitserve.core.errors import DeadlineExceededError, InvalidRequestError, SplitserveError, WorkerUnavailableError
from splitserve.core.memory import MemoryStep, MemoryTag, WeightsSource
from splitserve.core.messages import (
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    KVIndexReply,
    KVIndexRequest,
    MemoryRequest,
    RoleReply,
    RoleRequest,
    RoleStep,
    SchedulerReady,
    SchedulerState,
    StateReply,
    StateRequest,
    StepsReply,
    StepsRequest,
)
from splitserve.core.request import DisaggregationMode
from splitserve.core.steps import StepPage
from splitserve.server.scheduler_client import OutputStream, SchedulerClient

# Seconds in which a scheduler must answer an order, and must change its role.
_ANSWER_SECONDS = 10.0
_COMMIT_SECONDS = 120.0


class HalfSwitchedError(WorkerUnavailableError):
    """Some schedulers of the worker have changed their role, and others have not or are unknown. It cannot continue."""


class SchedulerGroup:
    """Clients of all schedulers. `ranks`: started clients, by data parallel rank; their owner closes them.

    `output_timeout`: seconds a stream waits for its next output before it aborts the request.
    """

    def __init__(
        self, ranks: Sequence[SchedulerClient], *, is_prefill: bool = False, output_timeout: float = 900.0
    ) -> None:
        self._ranks = tuple(ranks)
        self._is_prefill = is_prefill
        self._output_timeout = output_timeout

    @property
    def info(self) -> SchedulerReady | None:
        """Merge the ranks' infos: limits of the rank with the least room, sum of `pages_total`, endpoints by rank."""
        infos = [rank.info for rank in self._ranks if rank.info is not None]
        if len(infos) < len(self._ranks):
            return None
        least = min(infos, key=lambda info: info.max_total_tokens_per_request)
        return msgspec.structs.replace(
            least,
            pages_total=sum(info.pages_total for info in infos),
            kv_events_endpoints=[endpoint for info in infos for endpoint in info.kv_events_endpoints],
            kv_replay_endpoints=[endpoint for info in infos for endpoint in info.kv_replay_endpoints],
        )

    @property
    def failure(self) -> SplitserveError | None:
        return next((rank.failure for rank in self._ranks if rank.failure is not None), None)

    async def ready(self, timeout: float) -> None:
        """Wait for all ranks. Raises the error of the first that fails, see SchedulerClient."""
        await asyncio.gather(*(rank.ready(timeout) for rank in self._ranks))

    def submit(self, *requests: GenerateRequest, dp_rank: int | None = None) -> OutputStream:
        """Send the samples of one client request, all to `dp_rank` if it is given. Raises WorkerUnavailableError."""
        stream = OutputStream([r.rid for r in requests], self._give_up, self._output_timeout)
        try:
            for request in requests:
                rank = self._ranks[dp_rank] if dp_rank is not None else self._rank_for(request)
                rank.submit(request, stream)
        except SplitserveError:
            stream.close()
            raise
        return stream

    def abort(self, rid: str, message: str = "aborted") -> None:
        """End a request; its stream gets the final message. An unknown rid is ignored."""
        for rank in self._ranks:
            rank.abort(rid, message)

    async def flush_cache(self, timeout: float = 10.0) -> int:
        """Drop the unused prefix caches. Return the number of pages freed."""
        calls = (rank.call(FlushCacheRequest, FlushCacheReply, timeout) for rank in self._ranks)
        return sum(reply.num_pages_freed for reply in await asyncio.gather(*calls))

    async def states(self, timeout: float = 2.0) -> list[SchedulerState]:
        """Return the snapshots, by rank. Raises DeadlineExceededError, WorkerUnavailableError."""
        calls = (rank.call(StateRequest, StateReply, timeout) for rank in self._ranks)
        return [reply.state for reply in await asyncio.gather(*calls)]

    async def kv_index(self, dp_rank: int, timeout: float = 10.0) -> bytes:
        """Return all blocks that one rank holds: JSON of an IndexSnapshot.

        Raises DeadlineExceededError, WorkerUnavailableError.
        """
        return (await self._ranks[dp_rank].call(KVIndexRequest, KVIndexReply, timeout)).snapshot

    async def steps(self, dp_rank: int, since: int | None, limit: int, timeout: float = 10.0) -> StepPage:
        """Return records of one rank's steps. Raises DeadlineExceededError, WorkerUnavailableError."""
        rank = self._ranks[dp_rank]
        return (await rank.call(lambda id_: StepsRequest(id_, since, limit), StepsReply, timeout)).page

    async def prepare_role(self, mode: DisaggregationMode, bootstrap_url: str | None, timeout: float) -> None:
        """Let every rank prepare that role. Raises the error of the first that fails."""
        _check_done(await self._order(timeout, RoleStep.PREPARE, mode=mode, bootstrap_url=bootstrap_url))

    async def drain_role(self, timeout: float) -> None:
        """Wait until no rank holds any request. After that none accepts requests. Raises DeadlineExceededError."""
        _check_done(await self._order(timeout + _ANSWER_SECONDS, RoleStep.DRAIN, timeout=timeout))

    async def commit_role(self, mode: DisaggregationMode) -> None:
        """Let every rank change its role. Raises HalfSwitchedError unless all did or all refused."""
        _check_all_or_none(await self._order(_COMMIT_SECONDS, RoleStep.COMMIT), f"{mode}")
        self._is_prefill = mode is DisaggregationMode.PREFILL

    async def hold(self, timeout: float) -> None:
        """Wait until no rank holds any request. After that none accepts requests, until `cancel_role`, or the end of a
        change of memory. Raises DeadlineExceededError."""
        _check_done(await self._order(timeout + _ANSWER_SECONDS, RoleStep.HOLD, timeout=timeout))

    async def release_memory(self, tags: frozenset[MemoryTag]) -> None:
        """Let every rank release memory. Raises the error of the first that fails."""
        _check_done(await self._change(_COMMIT_SECONDS, MemoryStep.RELEASE, tags=tags))

    async def resume_memory(self, tags: frozenset[MemoryTag], bootstrap_url: str | None, timeout: float) -> None:
        """Let every rank resume memory. Raises the error of the first that fails."""
        _check_done(await self._change(timeout, MemoryStep.RESUME, tags=tags, bootstrap_url=bootstrap_url))

    async def load_weights(self, source: WeightsSource, timeout: float) -> None:
        """Let every rank load these weights. Raises the error of the first that fails."""
        _check_done(await self._change(timeout, MemoryStep.LOAD, source=source))

    async def use_weights(self, bootstrap_url: str | None) -> None:
        """Let every rank use the loaded weights. Raises HalfSwitchedError unless all did or all refused."""
        outcomes = await self._change(_COMMIT_SECONDS, MemoryStep.UPDATE, bootstrap_url=bootstrap_url)
        _check_all_or_none(outcomes, "with the new weights")

    async def discard_weights(self) -> None:
        """Let every rank drop loaded weights. Raises WorkerUnavailableError, DeadlineExceededError."""
        _check_done(await self._change(_ANSWER_SECONDS, MemoryStep.DISCARD))

    async def cancel_role(self) -> None:
        """Let every rank continue in its old role. Raises WorkerUnavailableError, DeadlineExceededError."""
        _check_done(await self._order(_ANSWER_SECONDS, RoleStep.CANCEL))

    def break_off(self, error: SplitserveError) -> None:
        """End all open requests with `error`, on every rank. The ranks continue to serve."""
        for rank in self._ranks:
            rank.break_off(error)

    def fail_all(self, error: SplitserveError) -> None:
        """End all open requests with `error`, on every rank."""
        for rank in self._ranks:
            rank.fail_all(error)

    def failed(self, message: str, exit_code: int = 1) -> None:
        """Store the failure of a rank that all schedulers need."""
        for rank in self._ranks:
            rank.failed(message, exit_code)

    async def _order(self, seconds: float, step: RoleStep, **more: Any) -> list[RoleReply | BaseException]:
        """Send a step of a role switch to all ranks. Return their answers within `seconds`, or errors."""
        calls = (rank.call(lambda id_: RoleRequest(id_, step, **more), RoleReply, seconds) for rank in self._ranks)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _change(self, seconds: float, step: MemoryStep, **more: Any) -> list[RoleReply | BaseException]:
        """Send a step of a change of memory to all ranks. Return their answers within `seconds`, or errors."""
        calls = (rank.call(lambda id_: MemoryRequest(id_, step, **more), RoleReply, seconds) for rank in self._ranks)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for rank, outcome in zip(self._ranks, outcomes, strict=True):
            if isinstance(outcome, RoleReply) and outcome.model and rank.info is not None:
                rank.info = msgspec.structs.replace(rank.info, model=outcome.model)
        return outcomes

    def _rank_for(self, request: GenerateRequest) -> SchedulerClient:
        if self._is_prefill and request.bootstrap is not None:
            return self._ranks[request.bootstrap.prefill_rank(len(self._ranks))]
        return min(self._ranks, key=lambda rank: rank.num_tokens_outstanding)

    def _give_up(self, rids: list[str]) -> None:
        for rank in self._ranks:
            rank.give_up(rids)


def _check_all_or_none(outcomes: Sequence[RoleReply | BaseException], what: str) -> None:
    """Raise HalfSwitchedError unless all ranks are `what` now, or none; the error of the first if none is."""
    refusals = [outcome for outcome in outcomes if isinstance(outcome, RoleReply) and outcome.error]
    failures = [outcome for outcome in outcomes if isinstance(outcome, SplitserveError)]
    if failures or 0 < len(refusals) < len(outcomes):
        causes = "; ".join([*(r.error for r in refusals), *(f.message for f in failures)])
        raise HalfSwitchedError(f"this worker's schedulers are not all {what} now: {causes}")
    _check_done(outcomes)


def _check_done(outcomes: Sequence[RoleReply | BaseException]) -> None:
    """Raise the error of the first outcome that is one."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome.error:
            raise _REFUSALS.get(outcome.status_code, WorkerUnavailableError)(outcome.error)


_REFUSALS: dict[int, type[SplitserveError]] = {400: InvalidRequestError, 504: DeadlineExceededError}
