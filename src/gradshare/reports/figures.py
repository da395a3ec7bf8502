"""The validation curves and the gates as figures. matplotlib's object interface: no pyplot, no global state."""

from __future__ import annotations

import io
import math
import warnings
from functools import reduce
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradshare.reports.against import best_index
from gradshare.reports.experiments import Experiment, Repeats, Setting, group, rank, value_text
from gradshare.reports.hover import Curve, Drawing, Panel, curve
from gradshare.reports.legends import legend_label, seeds_label, shortened, visible
from gradshare.reports.paper import DATA
from gradshare.reports.runs import Floats, Ints, Run, common_measure
from gradshare.reports.wording import GATE_LAM, GATE_M, MINUS

INK, GRID, PAPER = "#1b1f24", "#d9dde2", "#ffffff"


class Stroke(NamedTuple):
    color: str
    dashes: str | tuple[float, tuple[float, ...]]


# Okabe and Ito's colours, which colour-blind readers can tell apart; the line style says the same once more.
STROKES = {
    "original": Stroke(INK, "-"),
    "shared": Stroke("#d55e00", "-"),
    "half-rate": Stroke("#0072b2", (0, (5, 2))),
    "gate-only": Stroke("#009e73", (0, (5, 2, 1, 2))),
    "batch-only": Stroke("#cc79a7", (0, (1.2, 1.4))),
    "memory-only": Stroke("#e69f00", (0, (7, 2, 1, 2, 1, 2))),
    "conditioned": Stroke("#56b4e9", (0, (9, 2))),
}
ALONE, AMONG = (9.6, 4.1), (4.4, 2.5)  # inches: width of a panel with its margins, height of its axes
LEFT, RIGHT, ABOVE, BELOW, LEGEND_LINE = 0.75, 0.15, 0.36, 0.66, 0.19
OTHER = Stroke("#767b82", (0, (3, 1.5)))

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
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's own font
    "svg.hashsalt": "gradshare",  # the same figure gives the same bytes
}


def curves(runs: list[Run]) -> Drawing | None:
    """Validation accuracy (or loss) against epochs, a panel an experiment, with 95 % bands over tasks.

    An experiment without a value has no panel; None where none has any.

    A dot marks the best epoch. Of several seeds each is a thin line, and their mean a thick one.
    """
    begun = [one for one in group(runs) if any(best_index(run) is not None for run in one.runs)]
    experiments, accuracy = _as_in_the_paper(begun), common_measure(runs) == "accuracy"
    if not experiments:
        return None
    with matplotlib.rc_context(STYLE):
        figure, places = _panels(experiments, lines=1)
        drawn = []
        for one, axes in zip(experiments, places, strict=True):
            found = [line for repeats in one.repeats for line in _draw_repeats(axes, repeats)]
            _label_epochs(axes, f"validation {common_measure(runs)}")
            if accuracy:
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
            _legend(axes, len(experiments) == 1)
            drawn.append(Panel(axes, 1 if accuracy else None, found))
        return Drawing(figure, drawn)


def gates(runs: list[Run]) -> Drawing | None:
    """The means of sig(m) and sig(lam) over inner steps, a panel an experiment; None if no run has any.

    Of a single run each inner step is a faint line too.
    """
    gated = _as_in_the_paper(group([run for run in runs if run.m is not None or run.lam is not None]))
    if not gated:
        return None
    with matplotlib.rc_context(STYLE):
        figure, places = _panels(gated, lines=2)
        drawn = []
        for one, axes in zip(gated, places, strict=True):
            axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
            alone = len(one.runs) == 1
            found = [line for repeats in one.repeats for line in _draw_gates(axes, repeats, alone)]
            _label_epochs(axes, f"mean {GATE_M}, {GATE_LAM}")
            _widen(axes)
            _legend(axes, len(gated) == 1)
            drawn.append(Panel(axes, 3, found))
        return Drawing(figure, drawn)


def _as_in_the_paper(experiments: list[Experiment]) -> list[Experiment]:
    """Row after row: a row for each shots and tasks, in it the methods."""
    return sorted(experiments, key=lambda one: _row(one.setting))


def _row(one: Setting) -> list[float]:
    return [rank(one.ways), rank(one.shots), -rank(one.tasks)]


def _columns(experiments: list[Experiment]) -> int:
    """A column a method where that leaves no gaps."""
    number = len(experiments)
    methods = len({value_text(one.setting.method) for one in experiments})
    rows = len({value_text([one.setting.shape, one.setting.tasks]) for one in experiments})
    if 1 < methods <= 3 and number == methods * rows:
        return methods
    return min(number, 2 if number in (2, 4) else 3)


def _panels(experiments: list[Experiment], lines: int) -> tuple[Figure, list[Axes]]:
    """A figure with a panel an experiment, laid out in inches; below each, room for so many lines of legend an arm."""
    columns, alone = _columns(experiments), len(experiments) == 1
    wide, high = ALONE if alone else AMONG
    rows = [experiments[start : start + columns] for start in range(0, len(experiments), columns)]
    legends = [lines * max(len(one.repeats) for one in row) for row in rows]
    rooms = [BELOW + LEGEND_LINE * (math.ceil(number / 2) if alone and number > 3 else number) for number in legends]
    width, height = columns * wide, sum(ABOVE + high + room for room in rooms)
    figure, top, places = Figure(figsize=(width, height)), height, []
    for row, room in zip(rows, rooms, strict=True):
        for column, one in enumerate(row):
            left, bottom = column * wide + LEFT, top - ABOVE - high
            box = (left / width, bottom / height, (wide - LEFT - RIGHT) / width, high / height)
            places.append(figure.add_axes(box))
            if not alone:
                store = value_text(
                    one.setting.dataset
                )  # a figure is of one data set of the paper, in any of its stores
                other = "" if DATA.get(store, store) == store else f", {store}"
                title = visible(f"{one.setting.row}, {one.setting.shape}{other}")
                places[-1].set_title(title, fontsize=10, loc="left")
        top -= ABOVE + high + room
    return figure, places


def _legend(axes: Axes, alone: bool) -> None:
    """Below its panel, as the paper's say it: MaxVal, Ep, Test."""
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    wide, high = ALONE if alone else AMONG
    axes.legend(
        lines,
        [str(line.get_label()) for line in lines],
        loc="upper left",
        bbox_to_anchor=(-(LEFT - 0.1) / (wide - LEFT - RIGHT), -(BELOW - 0.1) / high),
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.3,
        ncols=2 if alone and len(lines) > 3 else 1,
        handlelength=2.2,
        fontsize=9 if alone else 8,
    )


def image(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a file's bytes, without dates or versions: the same figure always gives the same bytes."""
    nothing = {"png": ("Software",), "svg": ("Date", "Creator", "Format", "Type")}[kind]
    target = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a folder may be named in any script
        figure.savefig(target, format=kind, dpi=160, metadata=dict.fromkeys(nothing))
    return target.getvalue()


def _draw_repeats(axes: Axes, repeats: Repeats) -> list[Curve]:
    """One run: its band, its line and its best epoch. Several: thin lines, and the mean where all have a value."""
    runs, stroke = repeats.runs, STROKES.get(repeats.arm, OTHER)
    alone = len(runs) == 1
    for run in runs:
        low, high = run.val - run.interval, run.val + run.interval
        axes.fill_between(run.epochs, low, high, color=stroke.color, alpha=0.13 / len(runs), linewidth=0)
        width: dict[str, Any] = {} if alone else {"linewidth": 0.7, "alpha": 0.55}
        label = visible(legend_label(run, repeats.name)) if alone else "_"
        axes.plot(run.epochs, run.val, color=stroke.color, linestyle=stroke.dashes, label=label, **width)
        best = best_index(run)
        if best is not None:
            dot = (
                {"markersize": 6.0, "markeredgecolor": PAPER} if alone else {"markersize": 3.5, "markeredgewidth": 0.0}
            )
            axes.plot(run.epochs[best], run.val[best], marker="o", color=stroke.color, **dot)
    found = [
        curve(repeats.name if alone else _seed(repeats, run), stroke.color, run.epochs, run.val, run.interval)
        for run in runs
    ]
    if alone:
        return found
    epochs, mean = _mean([(run.epochs, run.val) for run in repeats.done])
    axes.plot(epochs, mean, color=stroke.color, linestyle=stroke.dashes, label=visible(seeds_label(repeats)))
    return [curve(f"{repeats.name}, mean", stroke.color, epochs, mean, mean * math.nan), *found]


def _seed(repeats: Repeats, run: Run) -> str:
    """A run among its repeats: shared, seed 0."""
    seed = run.config.get("seed")
    return run.name if seed is None else f"{repeats.name}, seed {value_text(seed)}"


def _draw_gates(axes: Axes, repeats: Repeats, alone: bool) -> list[Curve]:
    """The mean over inner steps (and over seeds): sig(m) in a full line, sig(lam) in a broken one."""
    stroke, found = STROKES.get(repeats.arm, OTHER), []
    for symbol, dashes, key in ((GATE_M, "-", "m"), (GATE_LAM, (0, (4, 2)), "lam")):
        known = [(run.epochs, steps) for run in repeats.done if (steps := _gate(run, key)) is not None]
        if not known:
            continue
        epochs, mean = _mean([(epochs, steps.mean(axis=1)) for epochs, steps in known])
        marker = "o" if len(epochs) == 1 else ""
        if alone:
            axes.plot(epochs, known[0][1], color=stroke.color, alpha=0.3, linewidth=0.7, linestyle=dashes, label="_")
        label = f"{shortened(repeats.name)}: {symbol}"
        axes.plot(epochs, mean, color=stroke.color, linestyle=dashes, marker=marker, label=visible(label))
        found.append(curve(f"{repeats.name} {symbol}", stroke.color, epochs, mean, mean * math.nan))
    return found


def _mean(lines: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    """The mean of several lines at the epochs that all of them have."""
    if all(len(epochs) == 0 for epochs, _ in lines):
        return lines[0]
    begun = [line for line in lines if len(line[0])]
    epochs = reduce(np.intersect1d, [one for one, _ in begun])
    return epochs, np.mean([values[np.searchsorted(one, epochs)] for one, values in begun], axis=0)


def _label_epochs(axes: Axes, label: str) -> None:
    axes.margins(x=0.02)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}".replace("-", MINUS)))


def _widen(axes: Axes, least: float = 0.1) -> None:
    """Show at least that range of a gate, so that noise does not look like a trend."""
    low, high = axes.get_ylim()
    missing = max(0.0, least - (high - low))
    axes.set_ylim(low - missing / 2, high + missing / 2)


def _gate(run: Run, key: str) -> Floats | None:
    return run.m if key == "m" else run.lam
