"""`splitserve up`: a LocalCluster in a terminal, from the first progress line to the last Ctrl-C."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from splitserve.engine.sources import resolve_model
from splitserve.launch.console import progress, standard_output
from splitserve.launch.fit import check_fit
from splitserve.launch.local import ClusterError, LocalCluster

# Seconds between two looks at the processes.
_WATCH_INTERVAL = 0.5


def run_up(cluster: LocalCluster, model: str, *, load_timeout: float = 900.0) -> int:
    """Start, show, watch, drain. Returns the exit code: 0 after a Ctrl-C, 1 where the cluster cannot serve."""
    console = Console(stderr=True)
    folder = resolve_model(model)
    for shape in cluster.shapes:
        check_fit(folder, model, tp_size=shape.tp_size, pp_size=shape.pp_size)
    with _signals() as ended:
        try:
            with cluster:
                wait_ready(cluster, console, load_timeout, ended.is_set)
                if ended.is_set():
                    return 0
                _show(cluster, model)
                return _watch(cluster, console, ended)
        except ClusterError as error:
            console.print("[bold red]error:[/]", end=" ")
            console.print(error.message, markup=False, highlight=False, soft_wrap=True)
            return 1


def wait_ready(
    cluster: LocalCluster, console: Console, timeout: float, is_cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Wait for every worker, with a line of progress. Returns early when cancelled. Raises ClusterError."""
    started = time.monotonic()
    with progress(console, "starting") as show:

        def on_progress() -> None:
            if is_cancelled():
                raise _CancelledError
            workers = cluster.workers
            states = ", ".join(f"{w.name} {w.status}" for w in workers)
            # Where lines stay, seconds would make one each.
            seconds = f" ({time.monotonic() - started:.0f} s)" if console.is_terminal else ""
            show(f"starting{seconds}: {states}")

        try:
            cluster.wait_ready(timeout, on_progress)
        except _CancelledError:
            return


class _CancelledError(Exception):
    """The user does not want to wait."""


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one interrupts whatever is under way."""
    ended = threading.Event()

    def on_signal(number: int, _: object) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(cluster: LocalCluster, model: str) -> None:
    """What to do with it, on standard output."""
    console = standard_output()
    table = Table("worker", "role", "url", "pid", "status")
    for w in cluster.workers:
        table.add_row(w.name, w.role.value, w.url, str(w.pid), w.status)
    console.print(table)
    console.print(f"logs in {cluster.log_folder}, and they stay there if a process fails", highlight=False)
    console.print(f"ready at {cluster.router_url} (OpenAI API at {cluster.router_url}/v1)", highlight=False)
    body = {
        "model": model,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    command = (
        f"curl {cluster.router_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
    console.print(command, highlight=False, soft_wrap=True, markup=False)
    console.print("Ctrl-C drains and stops", highlight=False)


def _watch(cluster: LocalCluster, console: Console, ended: threading.Event) -> int:
    """Report every process that ends by itself, until the user ends the rest. 1 if one did."""
    reported: set[str] = set()
    while not ended.wait(_WATCH_INTERVAL):
        for child in cluster.children:
            if child.exit_code is None or child.name in reported:
                continue
            reported.add(child.name)
            cluster.keep_logs()
            console.print(f"[bold red]{child.name} exited with code {child.exit_code}[/]; the end of its log:")
            console.print(child.log_tail(), markup=False, highlight=False, soft_wrap=True)
            console.print(
                "Nobody restarts it. Others of its kind serve on, if there are any; else requests get 503.",
                soft_wrap=True,
            )
        if all(w.status.startswith("exited") for w in cluster.workers) or "router" in reported:
            raise ClusterError(f"{'the router has' if 'router' in reported else 'all workers have'} ended: start again")
    console.print("draining: running requests finish first; Ctrl-C again stops at once")
    try:
        cluster.drain()
    except KeyboardInterrupt:
        cluster.stop_now()
    return 1 if reported else 0
