"""Pictures as SVG text, by matplotlib, which is imported when one is drawn.

They have no background and colours that can be read on a light and on a dark page.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARK, _INK = "#3f83d9", "#807f78"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
Plot = Callable[["Axes"], object]
"""Draws into the axes that it is given."""


def line(
    points: Sequence[tuple[float, float]],
    title: str,
    x_label: str,
    y_label: str,
    y_most: float | None = None,
) -> Plot:
    """One line through points of rising x; both axes begin at 0."""

    def draw(axes: Axes) -> None:
        axes.plot([x for x, _ in points], [y for _, y in points], color=MARK)
        axes.set(title=title, xlabel=x_label, ylabel=y_label, xlim=(0, None), ylim=(0, y_most))

    return draw


def columns(values: Sequence[float], title: str, x_label: str, y_label: str, y_most: float) -> Plot:
    """A column for each value, numbered from 1."""

    def draw(axes: Axes) -> None:
        numbers = list(range(1, len(values) + 1))
        axes.bar(numbers, values, color=MARK)
        axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, y_most), xticks=numbers)

    return draw


def to_svg(rows: Sequence[Sequence[Plot]], width: float = 5.2, height: float = 2.9) -> str:
    """The plots in rows, each of this size in inches. Raises ImportError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib, of lockstep[report]: {error}") from None
    across = max(map(len, rows))
    with matplotlib.rc_context(_STYLE):
        figure = Figure((across * width, len(rows) * height), layout="constrained")
        grid = figure.subplots(len(rows), across, squeeze=False)
        for plots, places in zip(rows, grid, strict=True):
            for number, axes in enumerate(places):
                if number < len(plots):
                    plots[number](axes)
                else:
                    axes.remove()
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]
