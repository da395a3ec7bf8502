"""The paper's own figures, and how a run departs from the paper's experiment. Nothing else of the paper is in numbers.

Source: Chang & Lipson, "Accelerating Meta-Learning by Sharing Gradients", table 1 (`table:5shot`, lines 170-176 of
paper.tex): 5-way 5-shot, inner rate 0.1, meta-test accuracy in percent with 95 % intervals, speed-up in percent. The
1-shot and the 10x figures are only in the paper's plots, so they are not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gradshare.experiments.presets import PRESETS, Experiment, described
from gradshare.method.variants import VARIANTS
from gradshare.reports.model import DATA, variant_of, whole_rate


class Percent(NamedTuple):
    """A row of the paper's table, as printed."""

    original: float
    original_interval: float
    shared: float
    shared_interval: float
    speed_up: float


TABLE = {  # (data, method, tasks in a batch)
    ("cub", "maml", 5): Percent(83.2, 1.4, 83.4, 1.4, 66),
    ("mini", "maml", 5): Percent(67.7, 1.8, 67.0, 1.8, 1),
    ("cub", "maml", 1): Percent(82.6, 1.5, 82.7, 1.5, 44),
    ("mini", "maml", 1): Percent(66.4, 1.8, 68.3, 1.8, 134),
    ("cub", "metasgd", 5): Percent(80.7, 1.5, 80.3, 1.5, 100),
    ("mini", "metasgd", 5): Percent(67.0, 1.8, 67.4, 1.8, 61),
    ("cub", "metasgd", 1): Percent(81.6, 1.5, 79.6, 1.6, 54),
    ("mini", "metasgd", 1): Percent(64.8, 1.9, 64.9, 1.9, 37),
    ("cub", "mamlpp", 5): Percent(72.7, 1.7, 73.8, 1.7, 42),
    ("mini", "mamlpp", 5): Percent(68.9, 1.8, 69.4, 1.8, 26),
    ("cub", "mamlpp", 1): Percent(76.1, 1.7, 76.5, 1.6, 100),
    ("mini", "mamlpp", 1): Percent(69.1, 1.8, 66.8, 1.8, 71),
}
RATES = {0.1: False, 1.0: True}  # inner rate: whether it is the paper's tenfold


@dataclass(frozen=True)
class Figure:
    """A test accuracy of the paper, with half its interval."""

    value: float
    interval: float


@dataclass(frozen=True)
class PaperCell:
    """The paper's figures for one experiment, as fractions."""

    original: Figure
    shared: Figure
    speed_up: float

    def of(self, arm: str) -> Figure | None:
        return {"original": self.original, "shared": self.shared}.get(arm)


def experiment_of(options: dict[str, Any]) -> Experiment | None:
    """The paper's experiment, or an arm of it, that a configuration belongs to; None if there is none."""
    data, rate, row = options.get("dataset"), whole_rate(options), variant_of(options.get("arm"))
    if not (isinstance(data, str) and data in DATA and isinstance(rate, float) and rate in RATES):
        return None
    asked: dict[str, Any] = {key: options.get(key) for key in ("shots", "tasks", "method")}
    original = Experiment(data=DATA[data], **asked, arm="original", tenfold=RATES[rate])
    known = row.rule or row.name in VARIANTS
    return original._replace(arm=row.name) if known and original in PRESETS.values() else None


def paper_cell(options: dict[str, Any]) -> PaperCell | None:
    """The paper's figures for the experiment of a configuration; None if its table has none."""
    one = experiment_of(options)
    if one is None or one.shots != 5 or one.tenfold or options.get("ways") != 5:
        return None
    original, original_interval, shared, shared_interval, speed_up = (
        round(value / 100, 4) for value in TABLE[one.data, one.method, one.tasks]
    )
    return PaperCell(Figure(original, original_interval), Figure(shared, shared_interval), speed_up)


def departures(options: dict[str, Any]) -> list[str]:
    """The options in which a run is not the paper's experiment: `epochs 20 (paper: 150)`."""
    one = experiment_of(options)
    if one is None:
        return []
    wanted = {key: value for key, (value, _) in described(one).items() if key not in ("arm", "inner_lr")}
    return [
        f"{key} {options[key]} (paper: {value})"
        for key, value in wanted.items()
        if key in options and options[key] != value
    ]
