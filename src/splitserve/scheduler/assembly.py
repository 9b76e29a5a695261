"""Assembly of one scheduler and its loop over a loaded engine."""

from __future__ import annotations

from contextlib import ExitStack

from splitserve.core.batch import PipelinedEngine
from splitserve.core.config import WorkerConfig
from splitserve.scheduler.grammar_queue import GrammarQueue
from splitserve.scheduler.loops import Loop, NormalLoop, OverlappedLoop, PipelinedLoop
from splitserve.scheduler.memory import SchedulerMemory
from splitserve.scheduler.parts import EnginePort, SchedulerParts, WorkerPorts
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.scheduler import Scheduler


def assemble_scheduler(
    config: WorkerConfig, engine: EnginePort, ports: WorkerPorts, bootstrap_url: str | None, closing: ExitStack
) -> tuple[Scheduler, Loop]:
    """Build the scheduler in `config`'s role, and its loop. `closing` closes what it opens, and the executors first.

    `bootstrap_url`: the worker's bootstrap server, if the role is prefill.
    """
    parts = SchedulerParts(config, engine, ports)
    current = parts.prepare(config.disaggregation.mode, bootstrap_url)
    role_switch = SchedulerRoleSwitch(parts, current)
    memory = SchedulerMemory(parts, role_switch)
    closing.callback(role_switch.close)
    closing.callback(memory.close)
    closing.callback(ports.role_thread.shutdown, wait=True)
    closing.callback(ports.grammar_pool.shutdown, wait=False, cancel_futures=True)
    # The running step must end before its memory is released.
    closing.callback(ports.step_thread.shutdown, wait=True)
    grammars = GrammarQueue(ports.compiler, ports.grammar_pool, ports.clock, ports.wake, config.scheduler)
    scheduler = Scheduler(parts, parts.install(current), grammars, role_switch, memory)
    runner, pp_size = parts.runner, parts.pp_size
    if not parts.overlaps:
        return scheduler, NormalLoop(scheduler, runner)
    if pp_size > 1 and isinstance(runner, PipelinedEngine):
        return scheduler, PipelinedLoop(scheduler, runner, ports.step_thread, ports.wake, pp_size)
    return scheduler, OverlappedLoop(scheduler, runner, ports.step_thread, ports.wake)
