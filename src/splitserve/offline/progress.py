"""Progress display on standard error, only if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from splitserve.core.errors import SplitserveError
from splitserve.offline.outputs import Output


def console_for(*, progress: bool) -> Console:
    console = Console(stderr=True)
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
