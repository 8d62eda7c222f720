"""Curves over a logarithmic axis, as SVG for a file and as bars for a terminal. Knows numbers and names alone."""

from collections.abc import Sequence as Many
from math import ceil, log2
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 210, 40, 50
_COLOURS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8d5ab0", "#c98b2b", "#4a4a4a", "#23a0a0", "#a02370")
_FONT = 'font-family="sans-serif" font-size="12"'


class Point(NamedTuple):
    x: float
    y: float


class Curve(NamedTuple):
    name: str
    points: tuple[Point, ...]
    dashed: bool = False


def svg(title: str, x_name: str, y_name: str, curves: Many[Curve]) -> str:
    """A picture with its own axes and legend; x doubles from mark to mark, y starts at 0."""
    points = [point for curve in curves for point in curve.points]
    assert points and min(point.x for point in points) > 0, "nothing to draw"
    low, high = log2(min(point.x for point in points)), log2(max(point.x for point in points))
    top = _round_up(max(point.y for point in points))

    def place(point: Point) -> tuple[float, float]:
        share = (log2(point.x) - low) / (high - low) if high > low else 0.5
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - point.y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 24, title, weight="bold"),
        _text((_WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_name),
        _text(8, _TOP - 8, y_name),
    ]
    for mark in range(5):
        x, y = place(Point(2**low, top * mark / 4))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(8, y + 4, f"{top * mark / 4:g}"))
    for value in sorted({point.x for point in points}):
        x, y = place(Point(value, 0))
        parts.append(_text(x - 12, y + 18, f"{value:g}"))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve.points))
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(_text(_WIDTH - _RIGHT + 14, _TOP + 18 * number, curve.name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def bars(curves: Many[Curve], width: int = 50) -> list[str]:
    """One line for each point, as long as its value."""
    most = max(point.y for curve in curves for point in curve.points)
    label = max(len(curve.name) for curve in curves)
    return [
        f"{curve.name:<{label}} {point.x:>6g} {'█' * max(1, round(point.y / most * width))} {point.y:,.0f}"
        for curve in curves
        for point in curve.points
    ]


def _text(x: float, y: float, words: str, *, colour: str = "#222", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}" {_FONT}>{escape(words)}</text>'


def _round_up(value: float) -> float:
    """The next number with two digits."""
    unit = 10.0 ** (len(str(int(max(value, 1)))) - 1) / 10
    return ceil(value / unit) * unit
