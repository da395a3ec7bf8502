"""The panels as image files, PNG and SVG. matplotlib's object interface: no pyplot, no global state."""

from __future__ import annotations

import io
import math
import re
import warnings
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradshare.reports.model import sort_key, text_of
from gradshare.reports.panels import FIRST, INK, MANY, Line, Panel, limits, tick_text

GRID, PAPER = "#d9dde2", "#ffffff"
ALONE, AMONG = (9.75, 4.1), (4.55, 2.5)  # inches: width of a panel with its margins, height of its axes
LEFT, RIGHT, ABOVE, BELOW, LEGEND_LINE = 0.9, 0.45, 0.36, 0.66, 0.19
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same layout on every machine
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a name such as a$b stays text
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text: searchable
    "svg.hashsalt": "gradshare",  # the same figure gives the same bytes
}


def image_files(kind: Literal["curves", "gates"], panels: list[Panel]) -> dict[str, bytes]:
    """A PNG and an SVG for each data set and inner rate, by file name, of the first ones if there are many."""
    files: dict[str, bytes] = {}
    for suffix, members in _parts(panels if len(panels) <= MANY else panels[:FIRST]).items():
        with matplotlib.rc_context(STYLE):
            figure = draw(members)
        files[f"{kind}{suffix}.png"], files[f"{kind}{suffix}.svg"] = (image(figure, form) for form in ("png", "svg"))
    return files


def _parts(panels: list[Panel]) -> dict[str, list[Panel]]:
    """The panels of each data set and inner rate, as in the paper, by the end of the file's name."""
    found: dict[tuple[str, str], list[Panel]] = {}
    for panel in panels:
        found.setdefault((panel.setting.data, text_of(panel.setting.inner_lr)), []).append(panel)
    if len(found) == 1:
        return {"": panels}
    parts: dict[str, list[Panel]] = {}
    for (data, rate), members in sorted(found.items()):
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"-{data}-{rate}")[-60:]
        parts[plain if plain not in parts else f"{plain}-{len(parts)}"] = members
    return parts


def image(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The content of a file, without dates or versions: the same figure always gives the same bytes."""
    nothing = {"png": ("Software",), "svg": ("Date", "Creator", "Format", "Type")}[kind]
    target = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a folder may be named in any script
        figure.savefig(target, format=kind, dpi=160, metadata=dict.fromkeys(nothing))
    return target.getvalue()


def draw(panels: list[Panel]) -> Figure:
    """The panels of one figure in rows, a row for each shape and number of tasks, with legends below."""
    panels = sorted(panels, key=_row)
    columns, alone = _columns(panels), len(panels) == 1
    wide, high = ALONE if alone else AMONG
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    rooms = [BELOW + LEGEND_LINE * max(_legend_shape(panel, alone)[1] for panel in row) for row in rows]
    width, height = columns * wide, sum(ABOVE + high + room for room in rooms)
    figure, top = Figure(figsize=(width, height)), height
    for row, room in zip(rows, rooms, strict=True):
        for column, panel in enumerate(row):
            left, bottom = column * wide + LEFT, top - ABOVE - high
            box = (left / width, bottom / height, (wide - LEFT - RIGHT) / width, high / height)
            _draw_panel(figure.add_axes(box), panel, alone)
        top -= ABOVE + high + room
    return figure


def _row(panel: Panel) -> tuple[Any, ...]:
    tasks, rest = sort_key(panel.setting.tasks)
    return sort_key(panel.setting.ways), sort_key(panel.setting.shots), -tasks, rest


def _columns(panels: list[Panel]) -> int:
    """A column for each method if that leaves no gaps."""
    methods = len({text_of(panel.setting.method) for panel in panels})
    rows = len({text_of([panel.setting.shape, panel.setting.tasks]) for panel in panels})
    if 1 < methods <= 3 and len(panels) == methods * rows:
        return methods
    return min(len(panels), 2 if len(panels) in (2, 4) else 3)


def _legend_shape(panel: Panel, alone: bool) -> tuple[int, int]:
    """The columns and the lines of its legend."""
    number = sum(bool(line.legend) for line in panel.lines)
    columns = 2 if alone and number > 3 else 1
    return columns, math.ceil(number / columns)


def _draw_panel(axes: Axes, panel: Panel, alone: bool) -> None:
    if panel.scale == "gate":
        axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
    for line in panel.lines:
        _draw_line(axes, line, panel)
    (left, right), (low, high) = limits(panel)
    axes.set(xlim=(left, right), ylim=(low, high), xlabel="epoch", ylabel=panel.label)
    _draw_levels(axes, panel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, panel.scale)))
    if not alone:
        one = panel.setting
        store = "" if text_of(one.dataset) == one.data else f", {text_of(one.dataset)}"
        axes.set_title(_visible(f"{one.row}, {one.shape}{store}"), fontsize=10, loc="left")
    wide, height = ALONE if alone else AMONG
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-(LEFT - 0.1) / (wide - LEFT - RIGHT), -(BELOW - 0.1) / height),
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.3,
        ncols=_legend_shape(panel, alone)[0],
        handlelength=2.2,
        fontsize=9 if alone else 8,
    )


def _draw_line(axes: Axes, line: Line, panel: Panel) -> None:
    """The band, the line and the dot at the best epoch."""
    colour, style = line.variant.colour, (0, line.dashes) if line.dashes else "-"
    if line.interval is not None:
        low, high = line.values - line.interval, line.values + line.interval
        axes.fill_between(line.epochs, low, high, color=colour, alpha=0.05 if line.thin else 0.13, linewidth=0)
    marker = "o" if panel.scale == "gate" and len(line.epochs) == 1 else ""
    look: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.55} if line.thin else {}
    name = _visible(line.legend)
    axes.plot(line.epochs, line.values, color=colour, linestyle=style, marker=marker, label=name, **look)
    if line.best is not None:
        dot = (
            {"markersize": 3.5, "markeredgewidth": 0.0} if line.thin else {"markersize": 6.0, "markeredgecolor": PAPER}
        )
        axes.plot(line.epochs[line.best], line.values[line.best], marker="o", color=colour, **dot)


def _draw_levels(axes: Axes, panel: Panel) -> None:
    """Each level as a dotted line, with a short bar where an arm first reached it."""
    labelled = {tick_text(value, panel.scale) for value in axes.get_yticks()}
    for mark in panel.marks:
        axes.axhline(mark.value, color=INK, linewidth=0.6, linestyle=(0, (1, 4)), zorder=1.5)
        if (text := tick_text(mark.value, panel.scale)) not in labelled:
            axes.text(1.005, mark.value, text, transform=axes.get_yaxis_transform(), fontsize=7, va="center")
        for arm, epoch in mark.reached:
            axes.plot(epoch, mark.value, marker="|", markersize=7, markeredgewidth=2, color=arm.colour, zorder=3)


def _visible(label: str) -> str:
    """matplotlib leaves out labels that begin with an underscore, and SVG allows no control characters."""
    text = "".join(character if character.isprintable() else " " for character in label)
    return f" {text}" if text.startswith("_") else text
