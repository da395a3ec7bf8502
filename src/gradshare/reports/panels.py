"""What figures show, as values: a panel for each experiment, a line for each arm. The page and the files draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradshare.method.variants import Variant
from gradshare.reports import words
from gradshare.reports.comparison import ArmResult, Comparison, ExperimentResult
from gradshare.reports.model import Arm, Floats, Ints, Run, Setting, text_of
from gradshare.reports.statistics import in_common_epochs, multiples, round_steps

Scale = Literal["accuracy", "loss", "gate", "lead"]
GATES = ((words.GATE_M, (), "m"), (words.GATE_LAM, (4.0, 2.0), "lam"))
STARTS = {"gate": 0.5, "lead": 0.0}  # what such a panel always shows: where a gate, or a lead, starts
LONGEST_NAME = 32
INK = "#1b1f24"
MANY, FIRST = 48, 12  # experiments: of more than the paper has, image files show the first, to save time
NO_SETTING = Setting(*[None] * len(Setting._fields))


@dataclass(frozen=True)
class Line:
    name: str
    legend: str  # in the files; "" for a line that is not in the legend
    variant: Variant
    dashes: tuple[float, ...]
    epochs: Ints  # [E]
    values: Floats  # [E]
    interval: Floats | None = None  # [E]
    thin: bool = False  # one seed of several, or one inner step of several
    best: int | None = None  # index of the epoch with a dot


@dataclass(frozen=True)
class Mark:
    """A level, and when arms first reached it: in mean over their seeds, as in the table of levels."""

    value: float
    reached: tuple[tuple[Variant, float], ...]  # arm, epoch


@dataclass(frozen=True)
class Panel:
    title: str
    label: str  # of the vertical axis
    scale: Scale
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    names: tuple[str, ...] = ()  # what each place on the horizontal axis is, if it is not an epoch
    setting: Setting = NO_SETTING


def curves(comparison: Comparison) -> list[Panel]:
    """Validation accuracy (or loss) over epochs; an experiment without a value has no panel.

    Each run has a band, its 95 % interval over tasks, and a dot at its best epoch. Of several seeds each is a thin
    line, and their mean a thick one. Levels are marked where an arm first reached them.
    """
    measure = comparison.measure
    begun = [one for one in comparison.experiments if any(run.best is not None for run in one.experiment.runs)]
    return [
        Panel(
            one.setting.title,
            f"validation {measure}",
            measure,
            tuple(line for arm in one.arms for line in _arm_lines(arm)),
            _marks(one),
            setting=one.setting,
        )
        for one in begun
    ]


def gates(comparison: Comparison) -> list[Panel]:
    """The means of the gates over inner steps; an experiment without gates has no panel.

    Of an experiment with a single run each inner step is a thin line too.
    """
    found = [(one, _gate_lines(one)) for one in comparison.experiments]
    label = f"mean {words.GATE_M}, {words.GATE_LAM}"
    return [Panel(one.setting.title, label, "gate", lines, setting=one.setting) for one, lines in found if lines]


def overview(comparison: Comparison) -> Panel | None:
    """The mean lead of sharing over the original in every experiment, from the smallest to the largest."""
    pairs = [(one, arm) for one in comparison.experiments if (arm := one.main("shared"))]
    leads = [(arm.against_original.difference, one.setting.title) for one, arm in pairs if arm.against_original]
    if len(leads) < 2:
        return None
    leads.sort(key=lambda pair: pair[0].mean)
    values = np.array([lead.mean for lead, _ in leads])
    interval = np.array([np.nan if lead.interval is None else lead.interval for lead, _ in leads])
    places = np.arange(1, len(leads) + 1)
    row = pairs[0][1].variant
    line = Line("mean lead of sharing", "", row, (), places, values, interval)
    title = f"Mean lead of sharing over the original, {len(leads)} experiments from the smallest to the largest"
    return Panel(
        title, f"mean lead in {words.unit(comparison.measure)}", "lead", (line,), names=tuple(name for _, name in leads)
    )


def _marks(one: ExperimentResult) -> tuple[Mark, ...]:
    """The levels that some arm reached."""
    found = [
        Mark(level.value, tuple((arm.variant, epoch.mean) for arm in one.arms if (epoch := arm.reached[at].epoch)))
        for at, level in enumerate(one.levels)
    ]
    return tuple(mark for mark in found if mark.reached)


def _arm_lines(arm: ArmResult) -> list[Line]:
    row, legend = arm.variant, _legend(arm)
    if len(arm.runs) == 1:
        (run,) = arm.runs
        return [Line(arm.name, legend, row, row.dashes, run.epochs, run.val, run.interval, best=run.best)]
    epochs, mean = _mean([(run.epochs, run.val) for run in arm.counted])
    seeds = [
        Line(_seed(arm, run), "", row, row.dashes, run.epochs, run.val, run.interval, thin=True, best=run.best)
        for run in arm.runs
    ]
    return [Line(f"{arm.name}, mean", legend, row, row.dashes, epochs, mean), *seeds]


def _seed(arm: Arm, run: Run) -> str:
    """A run among the seeds of its arm: shared, seed 0."""
    seed = run.options.get("seed")
    return run.name if seed is None else f"{arm.name}, seed {text_of(seed)}"


def _gate_lines(one: ExperimentResult) -> tuple[Line, ...]:
    alone = len(one.experiment.runs) == 1
    lines = []
    for arm in one.arms:
        for symbol, dashes, key in GATES:
            known = [(run.epochs, steps) for run in arm.counted if (steps := getattr(run, key)) is not None]
            if not known:
                continue
            name = f"{arm.name} {symbol}"
            epochs, mean = _mean([(epochs, steps.mean(axis=1)) for epochs, steps in known])
            if not len(epochs):
                continue
            lines.append(Line(name, f"{shortened(arm.name)}: {symbol}", arm.variant, dashes, epochs, mean))
            if alone:
                steps = known[0][1]
                lines += [
                    Line(f"{name}, step {at + 1}", "", arm.variant, dashes, epochs, steps[:, at], thin=True)
                    for at in range(steps.shape[1])
                ]
    return tuple(lines)


def _mean(lines: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    """The mean of several lines in the epochs that all of them have."""
    begun = [line for line in lines if len(line[0])]
    if not begun:
        return lines[0]
    epochs, values = in_common_epochs(begun)
    return epochs, values.mean(axis=0)


def _legend(arm: ArmResult) -> str:
    """The arm, its seeds, and its status: the tables have the numbers."""
    several, undone = len(arm.runs) > 1, len(arm.runs) - arm.done
    notes = [f"{len(arm.runs)} seeds"] if several else []
    notes += [f"{undone} not done" if several else arm.runs[0].status] if undone else []
    notes += ["no value yet"] if arm.best_val is None else []
    return shortened(arm.name) + (f" ({', '.join(notes)})" if notes else "")


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-LONGEST_NAME // 2 :]}"


# Axes


def limits(panel: Panel) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ranges of epochs and values that a panel shows, with a small margin."""
    epochs = np.concatenate([line.epochs for line in panel.lines])
    reaches = [0 if line.interval is None else np.nan_to_num(line.interval) for line in panel.lines]
    edges = [line.values + way * reach for line, reach in zip(panel.lines, reaches, strict=True) for way in (-1, 1)]
    values = np.concatenate([*edges, [STARTS.get(panel.scale, np.nan)]])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    least = 0.1 if panel.scale == "gate" else 1e-6 * max(1.0, abs(high))  # of a gate, so that noise is not a trend
    missing = max(0.0, least - (high - low))
    edge = 0.04 * (high - low + missing)
    return _padded(float(epochs.min()), float(epochs.max())), (low - missing / 2 - edge, high + missing / 2 + edge)


def _padded(first: float, last: float) -> tuple[float, float]:
    edge = 0.02 * (last - first) or 0.5
    return first - edge, last + edge


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most so many round values within a range.

    Example:
        >>> ticks(0.18, 0.63, 5), ticks(0.6, 20.4, 6, whole=True)
        ([0.2, 0.3, 0.4, 0.5, 0.6], [5.0, 10.0, 15.0, 20.0])
    """
    steps = [step for step in reversed(round_steps(high - low)) if not whole or step >= 1]
    choices = (multiples(low, high, step) for step in (*steps, 1.0))
    return next(values for values in choices if len(values) <= most)


def tick_text(value: float, scale: Scale) -> str:
    shown = f"{100 * value:.4g} %" if scale == "accuracy" else f"{value:.4g}"
    return ("+" if scale == "lead" and value > 0 else "") + shown.replace("-", words.MINUS)
