"""Curves on logarithmic axes as an SVG file, with several panels in a grid. Pure, without a library.

Both axes and the dashed reference of a panel have the same logarithms. A curve below the reference grows more slowly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Size of a panel and the margins of its axes, in pixels.
_WIDTH, _HEIGHT = 360, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 52, 46
_COLUMNS = 3
# Maximum number of labels on the horizontal axis.
_MAX_LABELS = 6


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


@dataclass(frozen=True, slots=True)
class _Axis:
    """Map of logarithms in [low, high] onto pixels in [begin, end]."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> _Axis:
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(0.05 * (high - low), 0.05)
        return cls(low - margin, high + margin, begin, end)

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """Return powers of ten, or 1, 2 and 5 times each if there would be fewer than two."""
        exponents = range(math.floor(self.low), math.ceil(self.high) + 1)
        for digits in ((1,), (1, 2, 5)):
            ticks = [d * 10.0**e for e in exponents for d in digits]
            inside = [t for t in ticks if self.low <= math.log10(t) <= self.high]
            if len(inside) > 1:
                break
        return inside


def draw(panels: Sequence[Panel], caption: str) -> str:
    """Return the text of an SVG file."""
    rows = -(-len(panels) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    parts += [_text(12, height - 10, caption, anchor="start"), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    across = _Axis.over(panel.xs, _LEFT, right)
    upward = _Axis.over([*panel.ys, *panel.reference], bottom, _TOP)
    parts = [
        _text(_LEFT, 20, panel.title, anchor="start", more='font-weight="bold"'),
        _text(_LEFT, 36, panel.subtitle, anchor="start", more='fill="#777"'),
        _text((_LEFT + right) / 2, _HEIGHT - 10, panel.x_name),
        _text(0, 0, panel.y_name, more=f'transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)"'),
    ]
    for tick in upward.ticks():
        y = upward.place(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:,g}", anchor="end"))
    every = -(-len(panel.xs) // _MAX_LABELS)
    for x in panel.xs[::every]:
        parts.append(_text(across.place(x), bottom + 16, f"{x:,g}"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#777"/>')
    for ys, style in ((panel.reference, 'stroke="#999" stroke-dasharray="4 4"'), (panel.ys, 'stroke="#1f6fb4"')):
        points = [(across.place(x), upward.place(y)) for x, y in zip(panel.xs, ys, strict=True)]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {style}/>')
    parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="#1f6fb4"/>' for x, y in points]
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
