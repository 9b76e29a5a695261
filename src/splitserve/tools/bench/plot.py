"""Plot of curves on logarithmic axes, one panel per series, drawn by matplotlib (extra `bench`).

Both axes have the same logarithms as the dashed reference. A curve below the reference grows more slowly.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitserve.core.errors import ConfigError

_COLUMNS = 3
_CAPTION = "Dots: medians. Dashed: a unit of work costs what it costs at the smallest size. Both axes logarithmic."


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    subtitle: str
    x_name: str
    y_name: str
    # Increasing, above 0.
    xs: Sequence[float]
    ys: Sequence[float]
    # Reference values at the same xs.
    reference: Sequence[float]


def check_plots(path: Path) -> None:
    """Raise ConfigError if plots cannot be drawn, or not in the format of this file name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{path}: plots need matplotlib: pip install 'splitserve[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"--plot {path}: end the name in one of .{', .'.join(sorted(formats))}")


def write_plot(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels in a grid. The file name's suffix selects the format, e.g. .svg."""
    # Imported late: only plots need it. A Figure of one's own needs no display and no global state.
    from matplotlib.figure import Figure

    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 3 * rows + 0.3), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, _COLUMNS, squeeze=False).flat, panels, strict=False):
        axes.loglog(panel.xs, panel.reference, color="#999999", linestyle="dashed")
        axes.loglog(panel.xs, panel.ys, color="#1f6fb4", marker="o", markersize=4)
        axes.set_title(f"{panel.title}\n{panel.subtitle}", fontsize="medium", parse_math=False)
        axes.set(xlabel=panel.x_name, ylabel=panel.y_name)
        axes.grid(axis="y", color="#dddddd")
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    figure.supxlabel(_CAPTION, fontsize="small")
    figure.savefig(path)
