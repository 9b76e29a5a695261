"""Prefill and decode worker of several ranks each in one process. Each rank has memory, a transport and a manager.

Each worker has the interface of a single `KVWorker` of `kv_world.py` over all its ranks: `manager` is its driver's,
`pages` are the pools of all ranks in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve.core.layout import KVLayout
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.ranks.kv_follower import FollowerRooms
from splitserve.transfer.metadata import MetadataBuffers, MetadataRow
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.sender import KVSender
from splitserve.transfer.wire import KVArgs
from support.kv_world import BOOTSTRAP, NUM_ROWS, KVWorker, SteppedNetwork

# Tokens of a room at most, for content that `fill` generates.
MAX_TOKENS = 64


@dataclass
class Pipe:
    """One direction of a link, with frames in order. In step mode a frame waits until the test delivers it."""

    step: bool = False
    under_way: deque[bytes] = field(default_factory=deque)
    arrived: deque[bytes] = field(default_factory=deque)

    def put(self, frame: bytes) -> None:
        self.under_way.append(frame)
        if not self.step:
            self.let_through()

    def let_through(self) -> None:
        self.arrived.append(self.under_way.popleft())

    def take(self) -> list[bytes]:
        frames = list(self.arrived)
        self.arrived.clear()
        return frames


class PipeLink:
    """RankLink over two pipes."""

    def __init__(self, out: Pipe, into: Pipe) -> None:
        self._out = out
        self._into = into
        self.is_open = True

    def send(self, frame: bytes) -> None:
        self._out.put(frame)

    def collect(self) -> list[bytes]:
        return self._into.take()


@dataclass(frozen=True)
class RankLayouts:
    """Layout of each rank of a worker, stage by stage."""

    layouts: Sequence[KVLayout]
    tp_size: int

    def ranks(self) -> list[ParallelRank]:
        return list(ParallelRank(tp_size=self.tp_size, pp_size=len(self.layouts) // self.tp_size).group())


class WorkerRanks:
    """All ranks of one worker, with the driver's view of them."""

    def __init__(
        self, world: GroupWorld, role: DisaggregationMode, shape: RankLayouts, *, first_epoch: int, **options: Any
    ) -> None:
        ranks, row_bytes = shape.ranks(), MetadataBuffers(1).row_bytes
        group_args = [
            KVArgs(
                backend="fake", model="tiny", layout=layout, metadata_row_bytes=row_bytes, num_metadata_rows=NUM_ROWS,
                rank=rank,
            )
            for rank, layout in zip(ranks, shape.layouts, strict=True)
        ]  # fmt: skip
        self._driver = next(i for i, rank in enumerate(ranks) if rank.is_driver)
        # Ranks with a process that has died.
        self.dead: set[int] = set()
        followers = [i for i in range(len(ranks)) if i != self._driver]
        orders, reports = ({i: Pipe(world.wires.step) for i in followers} for _ in range(2))
        self.pipes = [pipe for i in followers for pipe in (orders[i], reports[i])]
        self._links = {i: PipeLink(orders[i], reports[i]) for i in followers}
        self.workers = [
            KVWorker(
                world,
                role,
                f"{role}-{i}",
                epoch=first_epoch + i,
                pool=args.layout,
                group_args=group_args if role is DisaggregationMode.DECODE else (),
                rank=args.rank,
                directory=world.book.copy(),
                links=list(self._links.values()) if i == self._driver else (),
                **options,
            )
            for i, args in enumerate(group_args)
        ]
        self.followers = {i: FollowerRooms(self.workers[i].manager, PipeLink(reports[i], orders[i])) for i in followers}

    @property
    def manager(self) -> Any:
        return self.driver.manager

    @property
    def driver(self) -> KVWorker:
        return self.workers[self._driver]

    @property
    def metadata(self) -> MetadataBuffers:
        return self.driver.metadata

    @property
    def pages(self) -> list[NDArray[np.uint8]]:
        return [component for worker in self.workers for component in worker.pages]

    def num_rooms(self) -> int:
        """Return the number of room ends that the worker still tracks."""
        followed = sum(f.num_rooms for f in self.followers.values())
        own: int = sum(worker.manager.num_rooms for worker in self.workers)
        return followed + own

    def kill(self, follower: int) -> None:
        """End a follower's process without a message."""
        self.dead.add(follower)
        self._links[follower].is_open = False

    def turns(self) -> list[Callable[[], object]]:
        alive = [i for i in range(len(self.workers)) if i not in self.dead]
        turns: list[Callable[[], object]] = [self.workers[i].manager.tick for i in alive]
        return [*turns, *(self.followers[i].tick for i in alive if i != self._driver), self.manager.collect_reports]

    def fill(self, pages: Sequence[int], seed: int) -> None:
        """Write random values into whole pages, on every rank its shard of them."""
        for rows, content in self._parts(pages, seed):
            rows.put(content)

    def holds(self, pages: Sequence[int], seed: int) -> bool:
        """Return whether every rank holds its shard of what `fill` wrote into as many tokens of another worker."""
        return all(rows.are(content) for rows, content in self._parts(pages, seed))

    def _parts(self, pages: Sequence[int], seed: int) -> Iterator[tuple[_Rows, NDArray[np.uint8]]]:
        """Yield (rows of the pages in a component, expected content), each [token, head, byte]. NHD pools."""
        for worker in self.workers:
            for memory, c in zip(worker.pages, worker.layout.components, strict=True):
                size = worker.layout.page_size
                content = _content(seed, c.name, c.layer, c.total_heads, c.page_bytes(1) // c.num_heads)
                yield (
                    _Rows(memory, list(pages), (len(pages) * size, c.num_heads, -1)),
                    content[: len(pages) * size, c.heads.start : c.heads.stop],
                )

    def busy_pipes(self) -> list[Pipe]:
        return [pipe for pipe in self.pipes if pipe.under_way]


class _Rows:
    """Some pages of a component, compared or overwritten as a whole."""

    def __init__(self, memory: NDArray[np.uint8], pages: list[int], shape: tuple[int, int, int]) -> None:
        self._memory, self._pages, self._shape = memory, pages, shape

    def put(self, content: NDArray[np.uint8]) -> None:
        self._memory[self._pages] = content.reshape(len(self._pages), -1)

    def are(self, content: NDArray[np.uint8]) -> bool:
        return bool((self._memory[self._pages].reshape(self._shape) == content).all())


@cache
def _content(seed: int, name: str, layer: int, total_heads: int, row_bytes: int) -> NDArray[np.uint8]:
    """Return the values of a room in one kind of component, [token, head, byte]."""
    rng = np.random.default_rng([seed, layer, *name.encode()])
    return rng.integers(0, 256, (MAX_TOKENS, total_heads, row_bytes), dtype=np.uint8)


class GroupWorld(SteppedNetwork):
    def __init__(
        self,
        prefill: RankLayouts,
        decode: RankLayouts,
        *,
        step: bool = False,
        late_fences: bool = False,
        prefill_options: dict[str, Any] | None = None,
        decode_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(step=step, late_fences=late_fences)
        self._shapes = prefill, decode
        self._options = prefill_options or {}, decode_options or {}
        self._graveyard: list[WorkerRanks] = []
        self.prefill = self._start(DisaggregationMode.PREFILL, 1000)
        self.decode = self._start(DisaggregationMode.DECODE, 2000)

    def _start(self, role: DisaggregationMode, first_epoch: int) -> WorkerRanks:
        i = 0 if role is DisaggregationMode.PREFILL else 1
        group = WorkerRanks(self, role, self._shapes[i], first_epoch=first_epoch, **self._options[i])
        if i == 0:
            self.book.entries[BOOTSTRAP] = [worker.manager.prefill_info() for worker in group.workers]
        return group

    def replace_prefill(self, *, epoch: int) -> WorkerRanks:
        """Start a new prefill worker. The old processes remain unchanged, but are no longer ticked. Return them."""
        old, self.prefill = self.prefill, self._start(DisaggregationMode.PREFILL, epoch)
        return old

    def replace_decode(self, *, epoch: int) -> None:
        """Replace the decode worker, as if its processes were killed and restarted at the same addresses."""
        for worker in self.decode.workers:
            worker.transport.close()
        # Keep the old memory: late bytes may still be written to it.
        self._graveyard.append(self.decode)
        self.decode = self._start(DisaggregationMode.DECODE, epoch)

    def sender(self, room: int = 1) -> KVSender:
        sender: KVSender = self.prefill.manager.sender(f"p{room}", BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room)))
        return sender

    def receiver(self, room: int = 1) -> KVReceiver:
        receiver: KVReceiver = self.decode.manager.receiver(f"d{room}", BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room)))
        return receiver

    def turns(self) -> list[Callable[[], object]]:
        return [*self.decode.turns(), *self.prefill.turns()]

    def num_rooms(self) -> int:
        """Return the number of room ends that the workers still track."""
        return self.prefill.num_rooms() + self.decode.num_rooms()

    def busy_pipes(self) -> list[Pipe]:
        return self.decode.busy_pipes() + self.prefill.busy_pipes()

    def tick(self, times: int = 6) -> None:
        """Run everything that is due."""
        for _ in range(times):
            for turn in self.turns():
                turn()
            while busy := self.busy_pipes():
                busy[0].let_through()
            while pairs := self.wires.busy():
                self.wires.deliver(pairs[0])

    def set_row(self, room: int, index: int = 0, token: int = 42) -> None:
        """Fill the prefill driver's metadata row of a room."""
        self.prefill.metadata.set_buf(index, MetadataRow(RoomKey(room), token))
