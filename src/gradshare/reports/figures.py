"""The validation curves and the gates as figures. matplotlib's object interface: no pyplot, no global state."""

from __future__ import annotations

import io
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradshare.reports.against import best_index
from gradshare.reports.runs import Floats, Run, TestResult
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
        _label_epochs(axes, f"validation {runs[0].measure}")
        if runs[0].measure == "accuracy":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
        figure.legend(loc="outside lower left", ncols=2 if len(runs) > 3 else 1, handlelength=3)
        return figure


def gates(runs: list[Run]) -> Figure | None:
    """The means of sig(m) and sig(lam) over inner steps, and each step as a faint line; None if no run has any."""
    panels = {f"{GATE_M}: weight of the new batch": "m", f"{GATE_LAM}: weight of the shared gradient": "lam"}
    present = {title: key for title, key in panels.items() if any(_gate(run, key) is not None for run in runs)}
    if not present:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4 if len(present) > 1 else 5.0, 3.5), layout="constrained")
        for position, (title, key) in enumerate(present.items(), start=1):
            axes = figure.add_subplot(1, len(present), position)
            axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
            for run in runs:
                _draw_gate(axes, run, _gate(run, key))
            axes.set_title(title, fontsize=10, loc="left")
            _label_epochs(axes, "")
        handles = {str(line.get_label()): line for axes in figure.axes for line in _labelled(axes)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=5, handlelength=3)
        return figure


def image(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a file's bytes, without dates or versions: the same figure always gives the same bytes."""
    nothing = {"png": ("Software",), "svg": ("Date", "Creator", "Format", "Type")}[kind]
    target = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=kind, dpi=160, metadata=dict.fromkeys(nothing))
    return target.getvalue()


def legend_label(run: Run) -> str:
    """As in the paper's legends: shared: MaxVal 67.1% Ep 8 Test 66.2±1.1%."""
    best, name = best_index(run), run.name if run.finished else f"{run.name} (unfinished)"
    if best is None:
        return f"{name}: no value yet"
    extreme = "MaxVal" if run.measure == "accuracy" else "MinVal"
    return f"{name}: {extreme} {_short(run, run.val[best])} Ep {run.epochs[best]}{_test_label(run)}"


def _test_label(run: Run) -> str:
    result: TestResult | None = run.test_ensemble or run.test_best
    if result is None:
        return ""
    if run.measure == "loss":
        return f" Test {result.loss:.3g}±{result.interval:.2g}"
    return f" Test {100 * result.accuracy:.1f}±{100 * result.interval:.1f}%"


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
    axes.plot(run.epochs, mean, color=stroke.color, linestyle=stroke.dashes, marker=marker, label=_visible(run.name))


def _label_epochs(axes: Axes, label: str) -> None:
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}".replace("-", MINUS)))


def _gate(run: Run, key: str) -> Floats | None:
    return run.m if key == "m" else run.lam


def _labelled(axes: Axes) -> list[matplotlib.lines.Line2D]:
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def _visible(label: str) -> str:
    """matplotlib leaves out labels that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label
