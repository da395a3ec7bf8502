"""The paper's 96 experiments by name: what each option is, and where that comes from, in one table.

A name is `DATA-SHOTSshot-TASKStask-METHOD`, with `+gs` for gradient sharing and `-10x` for ten times the inner rate:
`cub-5shot-5task-maml+gs`. Any other arm of an experiment, a control or conditioned sharing, has the original's name and
its own: `cub-5shot-5task-maml~half-rate`. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple, get_args

from gradshare.errors import UserError
from gradshare.runs.config import Arm, Method, RunConfig

CONTROLS: tuple[Arm, ...] = ("half-rate", "gate-only", "batch-only", "memory-only")
IMAGE = (3, 84, 84)  # channels, height, width of every experiment: "every image is resized to 84 by 84" (paper, A.1)


class Experiment(NamedTuple):
    """What tells an experiment from the others."""

    data: str
    shots: int
    tasks: int
    method: Method
    arm: Arm
    tenfold: bool

    @property
    def name(self) -> str:
        sharing = "+gs" if self.arm == "shared" else ""
        other = f"~{self.arm}" if self.arm not in ("original", "shared") else ""
        tenfold = "-10x" if self.tenfold else ""
        return f"{self.data}-{self.shots}shot-{self.tasks}task-{self.method}{sharing}{tenfold}{other}"


class Row(NamedTuple):
    """Options of the experiments whose names match, and who says so; later rows of the table win."""

    names: str
    options: dict[str, Any]
    source: str


A1, A2, A3 = "paper, appendix A.1", "paper, appendix A.2", "paper, appendix A.3"
CODE = "reference code of MAML++ (HowToTrainYourMAMLPytorch)"
TORCHMETA = f"{A1}: MAML and Meta-SGD load with Torchmeta, which"
LOADER = f"{A1}: MAML++ loads with its reference code, which"
TABLE = (  # all options but the machine's (device, engine, threads, eval_batch) and the seed
    Row("*", {"ways": 5, "queries": 15}, f"{A1}: 5-way, 15 test examples within each task"),
    Row("*", {"val_tasks": 600, "test_tasks": 600}, f"{A1}: 600 evaluation tasks for meta-validation and meta-testing"),
    Row("*", {"filters": 48}, f"{A2}: 4 convolutional layers of 48 filters"),
    Row("*", {"adapt_norm": False}, f"{A2} takes the {CODE}: the inner loop leaves batch norm's gain and bias"),
    Row("*", {"norm": "global"}, "paper, equation 1, read literally: one norm over all adapted weights"),
    Row("*", {"outer_lr": 1e-3}, f"{A3}: outer loop Adam with default hyperparameters"),
    Row("*", {"gradient_clamp": 0.0}, f"{A3}: no clamping is mentioned"),
    Row("mini-*-mamlpp*", {"gradient_clamp": 10.0}, f"{CODE}: where the data set is an ImageNet one"),
    Row("*", {"steps": 5}, f"{A3}: K = 5 steps"),
    Row("*", {"inner_lr": 0.1}, f"{A3}: inner loop gradient descent with learning rate 0.1"),
    Row("*-10x*", {"inner_lr": 1.0}, "paper, section 3: 10 times the inner loop learning rate"),
    Row("*", {"iterations": 1000}, f"{A3}: each epoch consists of 1000 iterations"),
    Row("cub-*-5task-*", {"epochs": 150}, f"{A3}: for task batch size 5, CUB for 150 epochs"),
    Row("mini-*-5task-*", {"epochs": 250}, f"{A3}: for task batch size 5, MiniImagenet for 250 epochs"),
    Row("cub-*-1task-*", {"epochs": 5 * 150}, f"{A3}: for task batch size 1, 5 times as many epochs"),
    Row("mini-*-1task-*", {"epochs": 5 * 250}, f"{A3}: for task batch size 1, 5 times as many epochs"),
    Row("cub-*", {"dataset": "cub"}, f"{TORCHMETA} takes the shorter side to 126 and crops the centre, 84 x 84"),
    Row("mini-*", {"dataset": "mini"}, f"{TORCHMETA} resizes to 84 x 84"),
    Row("*", {"pixels": "unit"}, f"{TORCHMETA} leaves pixels from 0 to 1"),
    Row("cub-*-mamlpp*", {"dataset": "cub-resize"}, f"{LOADER} resizes the whole image to 84 x 84"),
    Row("mini-*-mamlpp*", {"dataset": "mini"}, f"{LOADER} resizes to 84 x 84"),
    Row("*-mamlpp*", {"pixels": "imagenet"}, f"{LOADER} takes out ImageNet's mean and standard deviation"),
    Row("*", {"recipe": "reference"}, f"{CODE}: multi-step loss fading for 15 epochs, second order, constant rate"),
)


def _experiments(arms: Sequence[Arm]) -> Iterable[Experiment]:
    methods: tuple[Method, ...] = ("maml", "metasgd", "mamlpp")
    for data, shots, tasks, method, tenfold in product(("cub", "mini"), (1, 5), (1, 5), methods, (False, True)):
        for arm in arms:
            yield Experiment(data, shots, tasks, method, arm, tenfold)


PRESETS = {one.name: one for one in _experiments(("original", "shared"))}
EVERY_ARM = {one.name: one for one in _experiments(get_args(Arm))}


def experiment(name: str) -> Experiment:
    """What a name stands for."""
    if name not in EVERY_ARM:
        near = get_close_matches(name, EVERY_ARM, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"there is no preset '{name}'{hint} (gradshare grid list shows them all)")
    return EVERY_ARM[name]


def described(name: str) -> dict[str, tuple[Any, str]]:
    """Every option that a preset sets: its value and its source."""
    one = experiment(name)
    options: dict[str, tuple[Any, str]] = {
        option: (getattr(one, option), "the name") for option in ("shots", "tasks", "method", "arm")
    }
    for row in TABLE:
        if fnmatchcase(name, row.names):
            options.update((option, (value, row.source)) for option, value in row.options.items())
    return options


def preset(name: str, **given: Any) -> RunConfig:
    """The configuration of an experiment; options given beside the name win.

    Example:
        >>> config = preset("cub-5shot-5task-maml+gs", epochs=3)
        >>> config.dataset, config.shots, config.arm, config.inner_lr, config.epochs
        ('cub', 5, 'shared', 0.1, 3)
    """
    options = {option: value for option, (value, _) in described(name).items()}
    config = RunConfig(**{**options, **given})
    return config if "arm" in given else replace(config, **arm_options(config, config.arm))


def arm_options(config: RunConfig, arm: Arm) -> dict[str, Any]:
    """What sets an arm apart: its first link, or for the half-rate control the original's inner rate."""
    return {"arm": arm, "inner_lr": config.inner_lr / 2 if arm == "half-rate" else config.inner_lr}


def select(patterns: Iterable[str], arms: Sequence[Arm] = ()) -> list[str]:
    """The names that match a pattern such as `cub-*-5task-*`, in the order of the list, each once.

    Args:
        patterns: names with `*`, `?` and `[...]`; with a `~` among the other arms, without among the 96 presets.
        arms: these arms of every experiment that matches, in place of the ones that the patterns say.
    """
    chosen = set()
    for pattern in patterns:
        found = [name for name in EVERY_ARM if ("~" in name) == ("~" in pattern) and fnmatchcase(name, pattern)]
        if not found:
            if not re.search(r"[*?\[]", pattern):
                experiment(pattern)
            raise UserError(f"no preset matches '{pattern}' (gradshare grid list shows them all)")
        chosen.update(found)
    if arms:
        chosen = {EVERY_ARM[name]._replace(arm=arm).name for name in chosen for arm in arms}
    return [name for name in EVERY_ARM if name in chosen]
