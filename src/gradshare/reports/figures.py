"""The validation curves and the gates as figures. matplotlib's object interface: no pyplot, no global state."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradshare.reports.against import best_index
from gradshare.reports.runs import Floats, Run, TestResult, common_measure
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
}
OTHER = Stroke("#56b4e9", (0, (3, 1.5)))
LONGEST_NAME = 32

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


def curves(runs: list[Run]) -> Figure:
    """Validation accuracy (or loss) against epochs, with 95 % bands over tasks; a dot marks the best epoch."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.4 + 0.11 * len(runs)), layout="constrained")
        axes = figure.add_subplot()
        for run in runs:
            _draw_curve(axes, run)
        _label_epochs(axes, f"validation {common_measure(runs)}")
        if common_measure(runs) == "accuracy":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
        figure.legend(loc="outside lower left", ncols=2 if len(runs) > 3 else 1, handlelength=3)
        return figure


def gates(runs: list[Run]) -> Figure | None:
    """The means of sig(m) and sig(lam) over inner steps, and each step as a faint line; None if no run has any."""
    panels = {
        f"{GATE_M}: weight of the new batch": "m",
        f"{GATE_LAM}: weight taken from the task's own gradient": "lam",
    }
    present = {title: key for title, key in panels.items() if any(_gate(run, key) is not None for run in runs)}
    if not present:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4 + 0.05 * len(runs)), layout="constrained")
        for position, (title, key) in enumerate(present.items(), start=1):
            axes = figure.add_subplot(1, len(present), position)
            axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
            for run in runs:
                _draw_gate(axes, run, _gate(run, key))
            axes.set_title(title, fontsize=10, loc="left")
            _label_epochs(axes, "")
            _widen(axes)
        handles = {str(line.get_label()): line for axes in figure.axes for line in _labelled(axes)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=5, handlelength=3)
        return figure


def image(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a file's bytes, without dates or versions: the same figure always gives the same bytes."""
    nothing = {"png": ("Software",), "svg": ("Date", "Creator", "Format", "Type")}[kind]
    target = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a folder may be named in any script
        figure.savefig(target, format=kind, dpi=160, metadata=dict.fromkeys(nothing))
    return target.getvalue()


def legend_label(run: Run) -> str:
    """As in the paper's legends: shared: MaxVal 67.1% Ep 8 Test 66.2±1.1%."""
    best, name = best_index(run), _shortened(run.name) + ("" if run.finished else " (unfinished)")
    if best is None:
        return f"{name}: no value yet"
    extreme = "MaxVal" if run.measure == "accuracy" else "MinVal"
    return f"{name}: {extreme} {_short(run, run.val[best])} Ep {run.epochs[best]}{_test_label(run)}"


def _test_label(run: Run) -> str:
    result: TestResult | None = run.test_ensemble or run.test_best
    value = math.nan if result is None else result.accuracy if run.measure == "accuracy" else result.loss
    if result is None or not math.isfinite(value):
        return ""
    if not math.isfinite(result.interval):
        return f" Test {_short(run, value)}"
    if run.measure == "loss":
        return f" Test {value:.3g}±{result.interval:.2g}"
    return f" Test {100 * value:.1f}±{100 * result.interval:.1f}%"


def _short(run: Run, value: float) -> str:
    return f"{100 * value:.1f}%" if run.measure == "accuracy" else f"{value:.3g}"


def _draw_curve(axes: Axes, run: Run) -> None:
    stroke = STROKES.get(run.arm, OTHER)
    low, high = run.val - run.interval, run.val + run.interval
    axes.fill_between(run.epochs, low, high, color=stroke.color, alpha=0.13, linewidth=0)
    axes.plot(run.epochs, run.val, color=stroke.color, linestyle=stroke.dashes, label=_visible(legend_label(run)))
    best = best_index(run)
    if best is not None:
        axes.plot(run.epochs[best], run.val[best], marker="o", markersize=6, color=stroke.color, markeredgecolor=PAPER)


def _draw_gate(axes: Axes, run: Run, steps: Floats | None) -> None:
    if steps is None:
        return
    stroke = STROKES.get(run.arm, OTHER)
    marker = "o" if len(run.epochs) == 1 else ""
    axes.plot(run.epochs, steps, color=stroke.color, alpha=0.3, linewidth=0.8, marker=marker, markersize=3)
    mean = steps.mean(axis=1)
    axes.plot(
        run.epochs,
        mean,
        color=stroke.color,
        linestyle=stroke.dashes,
        marker=marker,
        label=_visible(_shortened(run.name)),
    )


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


def _labelled(axes: Axes) -> list[matplotlib.lines.Line2D]:
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def _visible(label: str) -> str:
    """A label for a legend: matplotlib leaves out those that begin with an underscore, and SVG allows no controls."""
    text = "".join(character if character.isprintable() else " " for character in label)
    return f" {text}" if text.startswith("_") else text


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-LONGEST_NAME // 2 :]}"
