"""`splitserve cluster up`: a supervisor in a terminal, from the first line to the last Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from splitserve.cluster.commands import Credentials, check_startable
from splitserve.cluster.config import ClusterConfig
from splitserve.cluster.control import control_server
from splitserve.cluster.local_placer import ADDRESS, LocalPlacer
from splitserve.cluster.placer import Placer
from splitserve.cluster.supervisor import Supervisor
from splitserve.errors import ConfigError
from splitserve.launch.lifecycle import Lifecycle
from splitserve.launch.local import num_cores
from splitserve.launch.logs import setup_logger
from splitserve.launch.ready_file import ReadyInfo, write_ready_file

if TYPE_CHECKING:
    from splitserve.cluster.ray_placer import RayPlacer

# Seconds between two looks whether the cluster is ready.
_READY_INTERVAL = 0.5


def run_cluster_up(
    config: ClusterConfig, ray_address: str | None, *, ready_file: Path | None = None, exit_with_parent: bool = False
) -> int:
    """Returns the exit code when everything has ended.

    Raises ConfigError before anything has started, and where a process could not be started with what the file says.
    """
    check_startable(config)
    credentials = Credentials.read(config)
    setup_logger(config.log_level)
    return asyncio.run(_run(config, credentials, ray_address, ready_file, exit_with_parent))


async def _run(
    config: ClusterConfig, credentials: Credentials, ray_address: str | None, ready_file: Path | None, with_parent: bool
) -> int:
    console = Console(stderr=True, highlight=False)

    def tell(event: str) -> None:
        console.print(event, markup=False, soft_wrap=True)

    placer: Placer
    if ray_address is None:
        placer, host, cores = LocalPlacer(), ADDRESS, num_cores()
    else:
        ray = _connect(ray_address, config.name)
        placer, host, cores = ray, ray.address, None
    supervisor = Supervisor(config, credentials, placer, router_host=host, num_cores=cores, on_event=tell)
    lifecycle = Lifecycle()
    # Ray has put handlers of its own; from here on ours count.
    with lifecycle.watch(exit_with_parent=with_parent):
        watchers = [
            asyncio.create_task(_end_when_told(supervisor, lifecycle)),
            asyncio.create_task(_tell_ready(supervisor, ready_file)),
        ]
        try:
            async with control_server(config.name, supervisor):
                if isinstance(placer, LocalPlacer):
                    tell(f"logs of what has ended are in {placer.log_folder}, and stay there if any of it failed")
                await supervisor.run()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            # Also where another cluster of that name is up.
            await asyncio.to_thread(placer.close)
    tell("everything has ended")
    if supervisor.failure is not None:
        raise supervisor.failure
    return 0


def _connect(address: str, name: str) -> RayPlacer:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs the Python package 'ray' on every node: pip install 'splitserve[ray]'")
    from splitserve.cluster.ray_placer import RayPlacer

    return RayPlacer(address, f"splitserve-{name}")


async def _end_when_told(supervisor: Supervisor, lifecycle: Lifecycle) -> None:
    await lifecycle.draining.wait()
    supervisor.down(now=False)
    await lifecycle.stopping.wait()
    supervisor.down(now=True)


async def _tell_ready(supervisor: Supervisor, ready_file: Path | None) -> None:
    """Once, when everything serves."""
    while not (status := await supervisor.status()).is_ready:  # noqa: ASYNC110
        await asyncio.sleep(_READY_INTERVAL)
    assert status.router_url is not None
    console = Console(highlight=False)
    console.print(f"ready at {status.router_url} (OpenAI API at {status.router_url}/v1)", soft_wrap=True)
    console.print(
        f"Ctrl-C drains and stops; from another terminal: splitserve cluster status --name {status.name}, scale, down",
        soft_wrap=True,
    )
    sys.stdout.flush()
    if ready_file is not None:
        port = int(status.router_url.rpartition(":")[2])
        write_ready_file(ready_file, ReadyInfo(pid=os.getpid(), port=port, url=status.router_url))
