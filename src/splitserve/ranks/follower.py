"""A follower: executes the orders of its driver, one after the other, in one thread."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from splitserve.core.config import WorkerConfig
from splitserve.engine.build import BuiltEngine
from splitserve.engine.memory import BuiltEngineMemory
from splitserve.ranks.group import RankPlace
from splitserve.ranks.group_memory import exchange_over, outcome_of, take_step
from splitserve.ranks.group_orders import ChangeMemory, CloseTransfer, OpenTransfer, group_order_in
from splitserve.ranks.kv_transfer import follow_rooms
from splitserve.ranks.rank_channel import FollowerChannel


class Follower:
    """Executor of a driver's orders on a rank without a scheduler. Call `close` at the end."""

    def __init__(self, config: WorkerConfig, engine: BuiltEngine, place: RankPlace, channel: FollowerChannel) -> None:
        self._config = config
        self._engine = engine
        self._place = place
        self._channel = channel
        self._exchange = exchange_over(engine)
        self._runner = engine.follower()
        self._memory = BuiltEngineMemory(engine)
        # The open KV transfer, which runs in threads of its own.
        self._transfer = ExitStack()

    def run(self, data: bytes) -> None:
        """Execute an order. After an error the ranks are out of step: end the process."""
        match group_order_in(data):
            case None:
                self._runner.run(data)
            case OpenTransfer() as order:
                self._transfer.callback(self._channel.close_link)
                self._channel.open_link(order.number)
                place = replace(self._place, instance=order.instance)
                follow_rooms(self._config, self._engine, order.bootstrap_url, place, self._channel, self._transfer)
            case CloseTransfer():
                self._transfer.close()
            case ChangeMemory() as order:
                self._exchange(outcome_of(self._memory, take_step(self._memory, order)), order.step)

    def close(self) -> None:
        self._transfer.close()
        self._memory.close()
