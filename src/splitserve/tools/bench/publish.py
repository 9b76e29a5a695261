"""Output of a benchmark's report: a table for the terminal or JSON for scripts, and optionally a section of a log."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from splitserve.process.console import standard_output


class PublishableReport(Protocol):
    def to_json(self) -> Any: ...

    def table(self) -> Table: ...

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        ...


def publish(report: PublishableReport, *, as_json: bool, append_to: Path | None, console: Console) -> None:
    """Publish a report on standard output. `console`: receives remarks."""
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    else:
        standard_output().print(report.table())
    if append_to is not None:
        with append_to.open("a", encoding="utf-8") as log:
            log.write(report.markdown(datetime.date.today()))
        console.print(f"appended to {append_to}", highlight=False)
