"""Small plots as SVG text: lines, columns, bars. Colours and type come from the page's style.

Every plot is `WIDTH` x `HEIGHT` units and scales with its column; values are plain numbers, labels
are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 42
_TICKS = 5


def lines(
    points: Sequence[tuple[float, float]], x_label: str, y_label: str, y_most: float | None = None
) -> str:
    """One line through points of rising x; both axes begin at 0."""
    frame = _Frame(
        max((x for x, _ in points), default=0.0),
        max((y for _, y in points), default=0.0) if y_most is None else y_most,
    )
    path = " ".join(
        f"{'M' if n == 0 else 'L'}{frame.x(x):.1f},{frame.y(y):.1f}"
        for n, (x, y) in enumerate(points)
    )
    return frame.drawn(f'<path class="line" d="{path}"/>', x_label, y_label)


def columns(
    parts: Sequence[tuple[float, float, float]],
    x_label: str,
    y_label: str,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_most: float | None = None,
) -> str:
    """A column of the third value over each part (from, to); `x_ticks` one per part, if given."""
    frame = _Frame(
        max((right for _, right, _ in parts), default=0.0),
        max((value for _, _, value in parts), default=0.0) if y_most is None else y_most,
    )
    shapes = []
    for n, (left, right, value) in enumerate(parts):
        x, width = frame.x(left) + 1, max(frame.x(right) - frame.x(left) - 2, 0.5)
        top = frame.y(value)
        where = f"{left:.3g} to {right:.3g}" if x_ticks is None else x_ticks[n][1]
        title = escape(f"{where}: {value:.3g}")
        shapes.append(
            f'<rect class="mark" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{frame.y(0) - top:.1f}"><title>{title}</title></rect>'
        )
    return frame.drawn("".join(shapes), x_label, y_label, x_ticks)


def bars(rows: Sequence[tuple[str, float, bool]], unit: str) -> str:
    """A horizontal bar per (name, value, whether it stands out), the value beside it."""
    row_height, label_width = 30, 250
    height = row_height * len(rows) + 8
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    room = WIDTH - label_width - 90
    shapes = []
    for n, (name, value, ours) in enumerate(rows):
        y, width = n * row_height + 6, value / most * room
        shapes.append(
            f'<text class="name" x="{label_width - 8}" y="{y + 14}">{escape(name)}</text>'
            f'<rect class="{"mark" if ours else "other"}" x="{label_width}" y="{y}" '
            f'width="{max(width, 1):.1f}" height="18" rx="2"/>'
            f'<text class="value" x="{label_width + width + 6:.1f}" y="{y + 14}">'
            f"{value:.0f} {escape(unit)}</text>"
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(unit)}">'
        f"{''.join(shapes)}</svg>"
    )


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, about _TICKS of them."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
    return [step * n for n in range(math.ceil(most / step * 0.9999) + 1)]


class _Frame:
    """Axes from 0 to a round number, and where a value lies between them."""

    def __init__(self, x_most: float, y_most: float) -> None:
        self._x_most = x_most or 1.0
        self._y_ticks = ticks(y_most)
        self._y_most = self._y_ticks[-1]

    def x(self, value: float) -> float:
        return _LEFT + value / self._x_most * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / self._y_most * (HEIGHT - _TOP - _BOTTOM)

    def drawn(
        self,
        shapes: str,
        x_label: str,
        y_label: str,
        x_ticks: Sequence[tuple[float, str]] | None = None,
    ) -> str:
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(y_label)} over {escape(x_label)}">'
        ]
        for value in self._y_ticks:
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:g}</text>'
            )
        if x_ticks is None:
            within = (value for value in ticks(self._x_most) if value <= self._x_most)
            x_ticks = [(value, f"{value:g}") for value in within]
        for at, label in x_ticks:
            parts.append(
                f'<text class="x" x="{self.x(at):.1f}" y="{HEIGHT - _BOTTOM + 16}">'
                f"{escape(label)}</text>"
            )
        parts.append(shapes)
        parts.append(
            f'<text class="x label" x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}">'
            f"{escape(x_label)}</text></svg>"
        )
        return "".join(parts)
