"""The one report of all benchmarks: a table for the terminal, JSON for scripts, Markdown for a log or a page, a plot.

A benchmark returns a `Report`. `run_bench` writes it where the benchmark's options select.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import math
import os
import platform
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import psutil  # type: ignore[import-untyped]
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from splitserve import __version__
from splitserve.core.errors import ConfigError
from splitserve.core.machine import num_cores
from splitserve.core.options import check_ranges, size_text
from splitserve.process.console import standard_output
from splitserve.tools.bench.options import BenchOptions

if TYPE_CHECKING:
    from splitserve.tools.bench.series import Series

T = TypeVar("T")
Options = TypeVar("Options", bound=BenchOptions)
# Name of a figure -> its text for one measured item: a function, or a template of the item's fields, as for
# `str.format`. It may name fields of fields, e.g. "{transfer.seconds:ms}". A format may begin with a unit of `_UNITS`.
Cells = Sequence[tuple[str, Callable[[T], str] | str]]
# Text of a figure that an item does not have. `by_column` omits rows without any other.
ABSENT = "-"
# Unit in a template -> factor, e.g. "{seconds:ms}" or "{seconds:ms.3f}". Without a format: no decimals from 100 on.
# Beside these, "size" is a number of bytes in the largest unit that fits.
_UNITS = {"ms": 1e3, "MB": 1e-6, "short": 1.0}
_PLOT_COLUMNS = 3
_PLOT_CAPTION = "Dots: medians. Dashed: a unit of work costs what it costs at the smallest size. Both axes logarithmic."
# CPU time fields that are idle time, or that are included in another field.
_NOT_BUSY = frozenset({"idle", "iowait", "guest", "guest_nice"})


def describe_machine() -> dict[str, str]:
    """Return facts about the machine: name -> value."""
    return {
        "CPU": f"{_cpu_model()}, {num_cores()} cores usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "splitserve": __version__,
    }


class OthersWatch:
    """CPU use of other processes since construction. On a shared machine, it qualifies the figures."""

    def __init__(self) -> None:
        self._began = _cpu_seconds()

    def cores_taken(self) -> float:
        """Return the average number of busy cores. A child counts as ours only after it has been waited for."""
        now, (busy, ours, elapsed) = _cpu_seconds(), self._began
        return max(0.0, (now[0] - busy - (now[1] - ours)) / (now[2] - elapsed))


def _cpu_seconds() -> tuple[float, float, float]:
    """Return busy seconds of all cores, those of this process and its ended children, and the clock."""
    busy = {name: value for name, value in psutil.cpu_times()._asdict().items() if name not in _NOT_BUSY}
    ours = os.times()
    return sum(busy.values()), ours.user + ours.system + ours.children_user + ours.children_system, time.monotonic()


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


class _AbsentError(Exception):
    """A template names a field that is None or NaN."""


class _Template(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value = args[0]
        for name in field_name.split("."):
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
            if value is None or value != value:
                raise _AbsentError
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":
            return size_text(value)
        for unit, factor in _UNITS.items():
            if format_spec.startswith(unit):
                scaled = value * factor
                return format(scaled, format_spec.removeprefix(unit) or (",.0f" if scaled >= 100 else ".1f"))
        return format(value, format_spec)


def text_of(show: Callable[[T], str] | str, item: T) -> str:
    """Return the text of a figure. ABSENT if its template names a field that is None or NaN."""
    if not isinstance(show, str):
        return show(item)
    try:
        return _Template().vformat(show, (item,), {})
    except _AbsentError:
        return ABSENT


@dataclass(frozen=True, slots=True)
class Target:
    """Target of this project for a measured value."""

    name: str
    value: float
    limit: float
    is_at_most: bool

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.is_at_most else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        of_limit = {"at_most": self.is_at_most, "limit": self.limit}
        return {"target": self.name, **of_limit, "measured": self.value, "met": self.is_met}

    def texts(self) -> list[str]:
        """Return the cells of a row: measured value, limit, verdict."""
        limit = f"{'at most' if self.is_at_most else 'at least'} {self.limit:g}"
        if math.isnan(self.value):
            return [ABSENT, limit, "not measured"]
        return [f"{self.value:.2f}", limit, "met" if self.is_met else "not met"]


@dataclass(frozen=True, slots=True)
class ReportTable:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Conditions and verdict of this table alone.
    caption: str = ""
    # Rows in Markdown. None: all rows.
    digest: Sequence[Sequence[str]] | None = None

    @classmethod
    def by_row(cls, columns: Cells[T], items: Sequence[T], caption: str = "") -> ReportTable:
        """Return a table with one row per item."""
        rows = [[text_of(show, item) for _, show in columns] for item in items]
        return cls([name for name, _ in columns], rows, caption)

    @classmethod
    def by_column(cls, names: Sequence[str], figures: Cells[T], items: Sequence[T]) -> ReportTable:
        """Return a table with one column per item and one row per figure that any item has."""
        rows = [[name, *(text_of(show, item) for item in items)] for name, show in figures]
        return cls(["", *names], [row for row in rows if any(cell != ABSENT for cell in row[1:])])

    def markdown(self) -> str:
        """Return a Markdown table that ends with a newline."""
        rows = self.rows if self.digest is None else self.digest
        first, *others = ["| " + " | ".join(cells) + " |" for cells in (self.header, *rows)]
        lines = [first, "|---" * len(self.header) + "|", *others]
        return (f"{self.caption}.\n\n" if self.caption else "") + "\n".join(lines) + "\n"

    def rendered(self) -> Table:
        table = Table(*map(escape, self.header), title=escape(self.caption))
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    # What was measured, e.g. "Routers before mock workers".
    title: str
    # Command line that repeats the benchmark; set by `run_bench`.
    command: str = ""
    machine: Mapping[str, str] = field(default_factory=describe_machine)
    # Values of `--json`. A dict also gets the conditions.
    figures: Any
    tables: Sequence[ReportTable]
    # Model and load, in words. Empty: the title has them.
    setting: str = ""
    # Average number of cores that other processes kept busy, which `run_bench` sets unless the figures have it.
    cores_taken_by_others: float | None = None
    # Whether the figures already have these cores, or they cannot be measured.
    has_others: bool = False
    # Definitions of the figures.
    legend: str = ""
    # Verdicts, failures and what was not measured, each a line.
    remarks: Sequence[str] = ()
    # Series in the plot, a panel each. Empty: this benchmark has no plot.
    series: Sequence[Series] = ()
    # Whether the exit code is 1.
    failed: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield escape(self.title)
        for table in self.tables:
            yield table.rendered()
        others = f"{self._others}." if self._others else ""
        for line in (*self.remarks, self.legend, others):
            if line:
                yield escape(line)

    @property
    def _others(self) -> str:
        cores = self.cores_taken_by_others
        return "" if cores is None else f"Others kept {cores:.1f} cores busy meanwhile"

    def to_json(self) -> Any:
        if not isinstance(self.figures, dict):
            return self.figures
        conditions: dict[str, Any] = {"command": self.command, "machine": self.machine}
        if self.cores_taken_by_others is not None:
            conditions["cores_taken_by_others"] = self.cores_taken_by_others
        return conditions | self.figures

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        return f"\n## {date.isoformat()} · {self.title}\n\n{self.section()}"

    def section(self) -> str:
        """Return Markdown without a heading."""
        conditions = ["; ".join(f"{name}: {value}" for name, value in self.machine.items()), self.setting, self._others]
        parts = [f"`{self.command}`\n", "".join(f"{text}. " for text in conditions if text).strip() + "\n"]
        if self.legend:
            parts.append(f"{self.legend}\n")
        parts += [table.markdown() for table in self.tables]
        if self.remarks:
            parts.append("".join(f"- {remark}\n" for remark in self.remarks))
        return "\n".join(parts)


def run_bench(options: Options, measure: Callable[[Options, Console], Report]) -> int:
    """Check the options, measure, write the report, and return the exit code. Raises ConfigError.

    `measure` gets the options, and a console for its progress.
    """
    check_ranges(options)
    check_files(options)
    console, others = Console(emoji=False, stderr=True), OthersWatch()
    report = measure(options, console)
    if not report.has_others:
        report = replace(report, cores_taken_by_others=others.cores_taken())
    publish(replace(report, command=options.command), options, console)
    for remark in report.remarks if report.failed else ():
        console.print(remark, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1 if report.failed else 0


def check_files(options: BenchOptions) -> None:
    """Check all files, before minutes of measuring. Raises ConfigError."""
    if options.append_to is not None:
        _append(options.append_to, "--append-to")
    if options.page is not None:
        _around_section(options.page, options.SECTION)
    if (plot := options.plot_path) is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"{plot}: plots need matplotlib: pip install 'splitserve[bench]'")
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
        if plot.suffix.removeprefix(".") not in formats:
            raise ConfigError(f"--plot {plot}: end the name in one of .{', .'.join(sorted(formats))}")
        _append(plot, "--plot")


def publish(report: Report, options: BenchOptions, console: Console) -> None:
    """Write the report. `console`: receives the names of the files. Raises ConfigError."""
    if options.as_json:
        # A figure that is no number becomes null, because JSON has no NaN.
        sys.stdout.write(msgspec.json.encode(report.to_json()).decode() + "\n")
    else:
        standard_output().print(report, highlight=False)
    today = datetime.date.today()
    if options.append_to is not None:
        _append(options.append_to, "--append-to", report.markdown(today))
        console.print(f"appended to {options.append_to}", highlight=False)
    if (plot := options.plot_path) is not None:
        write_plot(report.series, plot)
        console.print(f"wrote {plot}", highlight=False)
    if options.page is not None:
        text = f"Measured {today.isoformat()} by {report.section()}"
        if plot is not None:
            text += f"\n![Time against size, one panel a series]({os.path.relpath(plot, options.page.parent)})"
        before, after = _around_section(options.page, options.SECTION)
        try:
            options.page.write_text(f"{before}\n\n{text.strip()}\n\n{after}", encoding="utf-8")
        except OSError as error:
            problem = f"cannot be written ({error.strerror}): name another file"
            raise ConfigError(f"--page {options.page}: {problem}") from error
        console.print(f"wrote {options.page}", highlight=False)


def _around_section(page: Path, name: str) -> tuple[str, str]:
    """Return the text up to and including the first mark, and the text from the second mark on."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {page}: cannot be read ({error.strerror}): name a page that is there") from error
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ConfigError(f"--page {page}: it has no section between {begin} and {end}: add these two lines")
    before, _, rest = text.partition(begin)
    return before + begin, end + rest.partition(end)[2]


def _append(path: Path, option: str, text: str = "") -> None:
    """Append to a file, or without `text` check that this is possible. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}): name another file") from error


def milliseconds(seconds: float) -> str:
    """Format as milliseconds: without decimals from 100 on."""
    return _Template().format_field(seconds, "ms")


def write_plot(series: Sequence[Series], path: Path) -> None:
    """Plot curves on logarithmic axes, one panel per series. The file name's suffix selects the format, e.g. .svg.

    Both axes have the same logarithms as the dashed reference. A curve below the reference grows more slowly.
    """
    # Imported late: only plots need it. A Figure of one's own needs no display and no global state.
    import matplotlib
    from matplotlib.figure import Figure

    rows = -(-len(series) // _PLOT_COLUMNS)
    figure = Figure(figsize=(4 * _PLOT_COLUMNS, 3 * rows + 0.3), layout="constrained")
    for axes, one in zip(figure.subplots(rows, _PLOT_COLUMNS, squeeze=False).flat, series, strict=False):
        sizes, least = [point.size for point in one.points], one.points[0].cost
        axes.loglog(sizes, [one.shown(least * p.work) for p in one.points], color="#999999", linestyle="dashed")
        axes.loglog(sizes, [one.shown(p.seconds) for p in one.points], color="#1f6fb4", marker="o", markersize=4)
        axes.set_title(f"{one.name}\n{one.conditions}", fontsize="medium", parse_math=False)
        axes.set(xlabel=one.size_name, ylabel=one.time_unit)
        axes.grid(axis="y", color="#dddddd")
    for axes in figure.axes[len(series) :]:
        axes.remove()
    figure.supxlabel(_PLOT_CAPTION, fontsize="small")
    # Text stays text: drawn letters make the file five times as large.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)
