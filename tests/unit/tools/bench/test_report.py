"""The report of all benchmarks: terminal, JSON, log, page and plot, and files that are refused before a benchmark."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.options import BenchOptions, GrowthBenchOptions, StartupBenchOptions
from splitserve.tools.bench.report import Report, ReportTable, Target, check_files, publish, text_of
from splitserve.tools.bench.series import Series, SeriesPoint

SIZES = (1, 2, 4, 8)
MARKS = "before\n<!-- bench growth -->\nold\n<!-- /bench growth -->\nafter\n"


def series(name, seconds_of):
    points = [SeriesPoint(size, size, (seconds_of(size),)) for size in SIZES]
    return Series(name, "made up", "things", "thing", "ms", points)


@pytest.fixture
def report():
    cells = [("fruit", lambda item: item), ("letters", lambda item: str(len(item)))]
    return Report(
        title="Fruit",
        command="splitserve bench fruit",
        machine={"CPU": "a", "memory": "b"},
        setting="On a table",
        cores_taken_by_others=0.25,
        legend="Letters: counted.",
        figures={"fruit": 2},
        tables=[ReportTable.by_row(cells, ["apple", "fig"], "Names [of fruit]")],
        remarks=["pear was not measured"],
        series=[series("flat", lambda n: 10.0), series("a < b & $c", lambda n: n * n)],
    )


def test_the_terminal_has_title_tables_remarks_and_legend_and_no_markup_of_theirs(report):
    out = io.StringIO()
    Console(file=out, width=80).print(report)
    lines = out.getvalue()
    for text in (
        "Fruit",
        "Names [of fruit]",
        "apple",
        "pear was not measured",
        "Letters: counted.",
        "Others kept 0.2 cores busy",
    ):
        assert text in lines


def test_a_column_an_item_leaves_out_figures_that_no_item_has():
    cells = [("letters", lambda item: str(len(item))), ("stone", lambda item: "-")]
    assert ReportTable.by_column(["A", "B"], cells, ["apple", "fig"]).rows == [["letters", "5", "3"]]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{seconds:ms}", "12.3"),
        ("{seconds:ms.3f} of {long:ms}", "12.300 of 1,500"),
        ("{inner.bytes:MB,.0f}", "2"),
        ("{inner.bytes:size}", "1.91 MiB"),
        ("{long:.2f} {long:short}", "1.50 1.5"),
        ("{nothing:ms}", "-"),
        ("{nothing.bytes:size} of {long}", "-"),
    ],
)
def test_a_template_has_units_and_fields_of_fields_and_is_absent_without_a_value(template, text):
    item = {"seconds": 0.0123, "long": 1.5, "inner": {"bytes": 2_000_000}, "nothing": None}
    assert text_of(template, item) == text


def test_a_target_is_met_on_its_side_of_the_limit():
    assert Target("a", 1.0, 1.0, is_at_most=True).texts() == ["1.00", "at most 1", "met"]
    assert Target("b", 0.94, 0.95, is_at_most=False).texts() == ["0.94", "at least 0.95", "not met"]


def test_a_log_gets_a_dated_section(report, tmp_path, capsys):
    log = tmp_path / "folder" / "log.md"
    output = BenchOptions(as_json=True, append_to=log)
    check_files(output)
    publish(report, output, Console(file=io.StringIO()))
    conditions = {"command": "splitserve bench fruit", "machine": report.machine, "cores_taken_by_others": 0.25}
    assert json.loads(capsys.readouterr().out) == {"fruit": 2, **conditions}
    heading, *rest = log.read_text().strip().split("\n\n")
    assert heading.startswith("## 20")
    assert heading.endswith(" · Fruit")
    assert rest == [
        "`splitserve bench fruit`",
        "CPU: a; memory: b. On a table. Others kept 0.2 cores busy meanwhile.",
        "Letters: counted.",
        "Names [of fruit].",
        "| fruit | letters |\n|---|---|\n| apple | 5 |\n| fig | 3 |",
        "- pear was not measured",
    ]


def test_a_log_that_cannot_be_appended_to_is_named_after_the_figures(report, capsys):
    with pytest.raises(ConfigError, match=r"--append-to /dev/full: cannot be written \(No space left"):
        publish(report, BenchOptions(as_json=True, append_to=Path("/dev/full")), Console(file=io.StringIO()))
    assert json.loads(capsys.readouterr().out)["fruit"] == 2


def test_a_digest_replaces_the_rows_in_markdown_alone(report):
    table = dataclasses.replace(report.tables[0], digest=[["fig", "3"]])
    assert "apple" not in table.markdown()
    assert table.rendered().row_count == 2


def test_a_page_gets_the_section_and_keeps_the_rest(report, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(MARKS.replace("growth", "startup"))
    output = StartupBenchOptions(as_json=True, page=page)
    check_files(output)
    publish(report, output, Console(file=io.StringIO()))
    text = page.read_text()
    assert text.startswith("before\n<!-- bench startup -->\n\nMeasured 20")
    assert "by `splitserve bench fruit`" in text
    assert text.endswith("- pear was not measured\n\n<!-- /bench startup -->\nafter\n")
    assert "old" not in text


@pytest.mark.parametrize("text", ["no marks", "<!-- /bench growth -->\n<!-- bench growth -->", None])
def test_a_page_without_the_section_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(ConfigError, match="--page"):
        check_files(GrowthBenchOptions(page=page))


def test_plots_without_their_library_are_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'splitserve\[bench\]'"):
        check_files(BenchOptions(plot=tmp_path / "plot.svg"))


def test_a_plot_of_an_unknown_format_is_refused(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'splitserve[bench]'")
    with pytest.raises(ConfigError, match=r"--plot .*: end the name in one of .*\.svg"):
        check_files(BenchOptions(plot=tmp_path / "plot.doc"))


def test_the_plot_beside_a_page_has_every_point_of_every_panel_in_its_place(report, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'splitserve[bench]'")
    page, plot = tmp_path / "page.md", tmp_path / "growth.svg"
    page.write_text(MARKS)
    output = GrowthBenchOptions(as_json=True, page=page, plot=plot)
    check_files(output)
    publish(report, output, Console(file=io.StringIO()))
    assert "(growth.svg)" in page.read_text()
    flat, steep = markers(plot)
    assert len(flat) == len(steep) == len(SIZES)
    assert len({y for _, y in flat}) == 1
    # Downwards is positive; on logarithmic axes a power is a straight line.
    steps = [b[1] - a[1] for a, b in itertools.pairwise(steep)]
    assert all(step < 0 for step in steps)
    assert steps == pytest.approx([steps[0]] * (len(SIZES) - 1), abs=0.2)


def markers(plot):
    """Return the places of the markers of each panel in an SVG file, without the small ones of the axes."""
    name = "{http://www.w3.org/2000/svg}"
    groups = ElementTree.parse(plot).iter(f"{name}g")
    panels = [group for group in groups if group.get("id", "").startswith("axes_")]
    return [
        [
            (float(use.get("x")), float(use.get("y")))
            for line in found.iter(f"{name}g")
            if line.get("id", "").startswith("line2d") and "fill: #1f6fb4" in ElementTree.tostring(line, "unicode")
            for use in line.iter(f"{name}use")
        ]
        for found in panels
    ]


def test_json_has_null_for_a_figure_that_is_no_number(capsys):
    report = Report(title="Fruit", figures={"share": math.nan}, tables=[])
    publish(report, BenchOptions(as_json=True), Console(file=io.StringIO()))
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["share"] is None
