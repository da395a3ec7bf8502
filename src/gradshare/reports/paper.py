"""The paper's own figures, and how a run departs from the paper's experiment. Nothing else of the paper is in numbers.

Source: Chang & Lipson, "Accelerating Meta-Learning by Sharing Gradients", table 1 (`table:5shot`, lines 170-176 of
paper.tex): 5-way 5-shot, inner rate 0.1, meta-test accuracy in percent with 95 % intervals, speed-up in percent. The
1-shot and the 10x figures stand in the paper's plots alone, and are not here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gradshare.experiments.presets import EVERY_ARM, Experiment, described


class PaperCell(NamedTuple):
    original: float
    original_interval: float
    shared: float
    shared_interval: float
    speed_up: float


TABLE = {  # (data, method, tasks a batch): a line of paper.tex each for both data sets
    ("cub", "maml", 5): PaperCell(83.2, 1.4, 83.4, 1.4, 66),
    ("mini", "maml", 5): PaperCell(67.7, 1.8, 67.0, 1.8, 1),
    ("cub", "maml", 1): PaperCell(82.6, 1.5, 82.7, 1.5, 44),
    ("mini", "maml", 1): PaperCell(66.4, 1.8, 68.3, 1.8, 134),
    ("cub", "metasgd", 5): PaperCell(80.7, 1.5, 80.3, 1.5, 100),
    ("mini", "metasgd", 5): PaperCell(67.0, 1.8, 67.4, 1.8, 61),
    ("cub", "metasgd", 1): PaperCell(81.6, 1.5, 79.6, 1.6, 54),
    ("mini", "metasgd", 1): PaperCell(64.8, 1.9, 64.9, 1.9, 37),
    ("cub", "mamlpp", 5): PaperCell(72.7, 1.7, 73.8, 1.7, 42),
    ("mini", "mamlpp", 5): PaperCell(68.9, 1.8, 69.4, 1.8, 26),
    ("cub", "mamlpp", 1): PaperCell(76.1, 1.7, 76.5, 1.6, 100),
    ("mini", "mamlpp", 1): PaperCell(69.1, 1.8, 66.8, 1.8, 71),
}
DATA = {"cub": "cub", "cub-resize": "cub", "mini": "mini"}  # our stores, and the paper's data set in each
RATES = {0.1: False, 1.0: True}  # inner rate: whether it is the paper's tenfold


def experiment_of(config: dict[str, Any]) -> Experiment | None:
    """The paper's experiment, or a control of it, that a configuration is a try at; None where it is none of them."""
    arm, rate = config.get("arm"), config.get("inner_lr")
    whole = round(2 * rate, 12) if arm == "half-rate" and isinstance(rate, float) else rate
    data = config.get("dataset")
    if not (isinstance(data, str) and data in DATA and isinstance(whole, float) and whole in RATES):
        return None
    asked: dict[str, Any] = {key: config.get(key) for key in ("shots", "tasks", "method", "arm")}
    if isinstance(asked["arm"], list | dict):
        return None
    return EVERY_ARM.get(Experiment(data=DATA[data], **asked, tenfold=RATES[whole]).name)


def paper_cell(config: dict[str, Any]) -> dict[str, Any] | None:
    """The paper's figures for the experiment of a configuration, as fractions; None where its table has none."""
    one = experiment_of(config)
    if one is None or one.shots != 5 or one.tenfold or config.get("ways") != 5:
        return None
    cell = TABLE[one.data, one.method, one.tasks]
    original, original_interval, shared, shared_interval, speed_up = (round(value / 100, 4) for value in cell)
    return {
        "original": {"value": original, "interval": original_interval},
        "shared": {"value": shared, "interval": shared_interval},
        "speed_up": speed_up,
    }


def departures(config: dict[str, Any]) -> list[str]:
    """The options in which a run is not the paper's experiment: `epochs 20 (paper: 150)`."""
    one = experiment_of(config)
    if one is None:
        return []
    wanted = {key: value for key, (value, _) in described(one.name).items() if key not in ("arm", "inner_lr")}
    return [
        f"{key} {config[key]} (paper: {value})"
        for key, value in wanted.items()
        if key in config and config[key] != value
    ]
