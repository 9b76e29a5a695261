"""Makes workers of a local cluster fail, and brings them back. They must run `orders.PROGRAM` to fail at a stage."""

from __future__ import annotations

import contextlib
import os
import signal

from splitserve.chaos.orders import Fault, Order
from splitserve.core.request import DisaggregationMode
from splitserve.launch.child import ChildProcess
from splitserve.launch.local import LocalCluster


def order_fault(child: ChildProcess, fault: Fault) -> Order:
    """It fails when it meets the stage, or when the order is withdrawn, never."""
    return Order.give(child.ready_path, fault)


def signal_worker(child: ChildProcess, number: signal.Signals) -> None:
    """Front end and schedulers together, as a whole machine fails; SIGCONT lets a stopped one go on."""
    assert child.ready is not None
    for pid in (child.pid, *child.ready.scheduler_pids, *child.ready.follower_pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def replace_worker(cluster: LocalCluster, role: DisaggregationMode, child: ChildProcess, name: str) -> ChildProcess:
    """Another one for it, which loads when this returns."""
    cluster.remove_worker(child)
    return cluster.add_worker(role, name)
