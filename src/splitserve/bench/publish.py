"""Where a benchmark's report goes: a table for the terminal or JSON for scripts, and a section of a log where asked."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from splitserve.launch.console import standard_output


class Report(Protocol):
    def to_json(self) -> Any: ...

    def table(self) -> Table: ...

    def markdown(self, date: datetime.date) -> str:
        """A section to append to a log."""
        ...


def publish(report: Report, *, as_json: bool, append_to: Path | None, console: Console) -> None:
    """`console`: for remarks, apart from the report itself on standard output."""
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    else:
        standard_output().print(report.table())
    if append_to is not None:
        with append_to.open("a", encoding="utf-8") as log:
            log.write(report.markdown(datetime.date.today()))
        console.print(f"appended to {append_to}", highlight=False)
