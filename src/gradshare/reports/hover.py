"""The values behind a drawn figure, and where they stand in it: what the page shows under the pointer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradshare.errors import printable
from gradshare.reports.runs import Floats, Ints


class Curve(NamedTuple):
    """A line of a panel, for those who ask for its values."""

    label: str
    color: str
    epochs: list[int]
    values: list[float | None]
    intervals: list[float | None]


class Panel(NamedTuple):
    axes: Axes
    digits: int | None
    """Decimals to tell values with: 1 for accuracies, in percent, 3 for gates, None for losses."""
    curves: list[Curve]


class Drawing(NamedTuple):
    figure: Figure
    panels: list[Panel]


def hover(drawing: Drawing) -> list[dict[str, Any]]:
    """For each panel of a drawn figure: its box and its scales in the SVG's units, and the values of its curves."""
    width, height = (72 * inches for inches in drawing.figure.get_size_inches())
    found = []
    for axes, digits, lines in drawing.panels:
        percent = digits == 1
        box, (left, right), (low, high) = axes.get_position(), axes.get_xlim(), axes.get_ylim()
        scale_x, scale_y = width * box.width / (right - left), -height * box.height / (high - low)
        edges = [width * box.x0, height * (1 - box.y1), width * box.x1, height * (1 - box.y0)]
        found.append(
            {
                "box": [round(edge, 2) for edge in edges],
                "x": [round(scale_x, 5), round(edges[0] - scale_x * left, 4)],
                "y": [round(scale_y / (100 if percent else 1), 5), round(edges[1] - scale_y * high, 4)],
                "unit": " %" if percent else "",
                "digits": digits,
                "curves": [_told(line, 100 if percent else 1) for line in lines],
            }
        )
    return found


def _told(line: Curve, scale: int) -> dict[str, Any]:
    def short(values: list[float | None]) -> list[float | None]:
        return [None if value is None else float(f"{scale * value:.4g}") for value in values]

    label = printable(line.label)
    return {**line._asdict(), "label": label, "values": short(line.values), "intervals": short(line.intervals)}


def curve(label: str, color: str, epochs: Ints, values: Floats, intervals: Floats) -> Curve:
    def plain(numbers: Floats) -> list[float | None]:
        return [float(value) if math.isfinite(value) else None for value in numbers]

    return Curve(label, color, epochs.tolist(), plain(values), plain(intervals))
