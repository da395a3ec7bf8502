"""The paper's 96 experiments by name: the value of every option, and its source, in one table.

A name is `DATA-SHOTSshot-TASKStask-METHOD`, with `+gs` for gradient sharing and `-10x` for ten times the inner rate:
`cub-5shot-5task-maml+gs`. Every other arm adds its name to the original's: `cub-5shot-5task-maml~half-rate`, or
`cub-5shot-5task-maml~my_rules:Additive` for a rule of your own. `LITERATURE` has presets of other papers, which are not
part of the grid. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

from gradshare.errors import UserError
from gradshare.method.variants import OWN, VARIANTS, variant
from gradshare.runs.config import Method, RunConfig, with_arm

IMAGE = (3, 84, 84)  # channels, height, width of every experiment: "every image is resized to 84 by 84" (paper, A.1)


class Experiment(NamedTuple):
    """One experiment of the paper, or another arm of it."""

    data: str
    shots: int
    tasks: int
    method: Method
    arm: str
    tenfold: bool

    @property
    def name(self) -> str:
        """The preset's name, which is also the name of its folder in a grid."""
        sharing = "+gs" if self.arm == "shared" else ""
        other = f"~{variant(self.arm).label}" if self.arm not in ("original", "shared") else ""
        tenfold = "-10x" if self.tenfold else ""
        return f"{self.data}-{self.shots}shot-{self.tasks}task-{self.method}{sharing}{tenfold}{other}"


class Row(NamedTuple):
    """Options of the experiments whose names match, and their source; a later row of the table wins."""

    names: str
    options: dict[str, Any]
    source: str


A1, A2, A3 = "paper, appendix A.1", "paper, appendix A.2", "paper, appendix A.3"
CODE = "reference code of MAML++ (HowToTrainYourMAMLPytorch)"
TORCHMETA = f"{A1}: MAML and Meta-SGD load with Torchmeta, which"
LOADER = f"{A1}: MAML++ loads with its reference code, which"
TABLE = (  # all options but the machine's (device, engine, threads, eval_batch, micro_batch, checkpoint) and the seed
    Row("*", {"ways": 5, "queries": 15}, f"{A1}: 5-way, 15 test examples within each task"),
    Row("*", {"val_tasks": 600, "test_tasks": 600}, f"{A1}: 600 evaluation tasks for meta-validation and meta-testing"),
    Row("*", {"backbone": "conv4", "filters": 48}, f"{A2}: 4 convolutional layers of 48 filters"),
    Row("*", {"start": None}, f"{A2} takes the {CODE}: random initial weights"),
    Row("*", {"adapt_norm": False}, f"{A2} takes the {CODE}: the inner loop leaves batch norm's gain and bias"),
    Row("*", {"adapt": None, "head_start": "learned"}, f"{CODE}: all filters and the head, from learned weights"),
    Row("*", {"inner": None}, f"{A3}: inner loop gradient descent"),
    Row("*", {"norm_statistics": "batch"}, f"{CODE}: batch norm normalises with the query batch, also at test"),
    Row("*", {"norm": "global"}, "paper, equation 1, read literally: one norm over all adapted weights"),
    Row("*", {"outer_lr": 1e-3}, f"{A3}: outer loop Adam with default hyperparameters"),
    Row("*", {"gates": 1.0}, f"{A3}: one outer loop, one rate"),
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
    Row("*", {"patience": 0}, f"{A3}: the number of epochs is fixed"),
    Row("cub-*", {"dataset": "cub"}, f"{TORCHMETA} takes the shorter side to 126 and crops the centre, 84 x 84"),
    Row("mini-*", {"dataset": "mini"}, f"{TORCHMETA} resizes to 84 x 84"),
    Row("*", {"pixels": "unit"}, f"{TORCHMETA} leaves pixels from 0 to 1"),
    Row("cub-*-mamlpp*", {"dataset": "cub-resize"}, f"{LOADER} resizes the whole image to 84 x 84"),
    Row("mini-*-mamlpp*", {"dataset": "mini"}, f"{LOADER} resizes to 84 x 84"),
    Row("*-mamlpp*", {"pixels": "imagenet"}, f"{LOADER} takes out ImageNet's mean and standard deviation"),
    Row("*", {"recipe": "reference"}, f"{CODE}: multi-step loss fading for 15 epochs, second order, constant rate"),
)


def _experiments(arms: Iterable[str]) -> Iterable[Experiment]:
    methods: tuple[Method, ...] = ("maml", "metasgd", "mamlpp")
    for data, shots, tasks, method, tenfold in product(("cub", "mini"), (1, 5), (1, 5), methods, (False, True)):
        for arm in arms:
            yield Experiment(data, shots, tasks, method, arm, tenfold)


FINN = "Finn et al., 2017 (MAML), appendix A.1"
CHEN = "code of Chen et al., 2019 (A closer look at few-shot classification), which also augments its images"
OTHERS = (  # presets of other papers: every option that is not its default
    Row("*", {"arm": "original"}, "the name"),
    Row("*", {"ways": 5, "steps": 5, "inner_lr": 0.01, "outer_lr": 1e-3}, "both papers"),
    Row("*-1shot-*", {"shots": 1}, "the name"),
    Row("*-5shot-*", {"shots": 5}, "the name"),
    Row("*-mini-*", {"dataset": "mini"}, "the name"),
    Row("*-cub-*", {"dataset": "cub"}, "the name"),
    Row("*-maml", {"method": "maml"}, "the name"),
    Row("*-fomaml", {"method": "fomaml"}, "the name"),
    Row("conv32-*", {"filters": 32, "queries": 15}, FINN),
    Row("conv32-*-1shot-*", {"tasks": 4}, FINN),
    Row("conv32-*-5shot-*", {"tasks": 2}, FINN),
    Row("conv32-*", {"iterations": 1000, "epochs": 60}, f"{FINN}: 60,000 iterations"),
    Row("conv32-*", {"gradient_clamp": 10.0}, "code of Finn et al., for MiniImagenet"),
    Row("conv64-*", {"filters": 64, "queries": 16, "tasks": 4, "pixels": "imagenet"}, CHEN),
    Row("conv64-*", {"adapt_norm": True}, f"{CHEN}: its inner loop moves every weight"),
    Row("conv64-*-1shot-*", {"iterations": 1000, "epochs": 60}, f"{CHEN}: 60,000 iterations"),
    Row("conv64-*-5shot-*", {"iterations": 1000, "epochs": 40}, f"{CHEN}: 40,000 iterations"),
)
LITERATURE = (
    *(f"conv32-mini-{shots}shot-maml" for shots in (1, 5)),
    *(f"conv64-{data}-{shots}shot-fomaml" for data, shots in product(("cub", "mini"), (1, 5))),
)


PRESETS = {one.name: one for one in _experiments(("original", "shared"))}
EVERY_ARM = {one.name: one for one in _experiments(VARIANTS)}


def experiment(name: str) -> Experiment:
    """The experiment of a name.

    Example:
        >>> experiment("cub-5shot-5task-maml~half-rate").arm, experiment("cub-5shot-5task-maml~my_rules:Additive").arm
        ('half-rate', 'my_rules:Additive')
    """
    original, _, arm = name.partition("~")
    if original in EVERY_ARM and EVERY_ARM[original].arm == "original" and OWN.fullmatch(arm):
        return EVERY_ARM[original]._replace(arm=arm)
    if name not in EVERY_ARM:
        near = get_close_matches(name, [*EVERY_ARM, *LITERATURE], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        others = f"gradshare grid list shows those of the paper; of other papers there are {', '.join(LITERATURE)}"
        raise UserError(f"there is no preset '{name}'{hint} ({others})")
    return EVERY_ARM[name]


def described(preset: str | Experiment) -> dict[str, tuple[Any, str]]:
    """Every option that a preset sets: its value and its source."""
    if preset in LITERATURE:
        return _rows(OTHERS, str(preset))
    one = experiment(preset) if isinstance(preset, str) else preset
    named = {option: (getattr(one, option), "the name") for option in ("shots", "tasks", "method", "arm")}
    return named | _rows(TABLE, one.name)


def _rows(table: Iterable[Row], name: str) -> dict[str, tuple[Any, str]]:
    """The options that a table sets for a name, with their sources."""
    rows = [row for row in table if fnmatchcase(name, row.names)]
    return {option: (value, row.source) for row in rows for option, value in row.options.items()}


def preset(name: str | Experiment, **given: Any) -> RunConfig:
    """The configuration of an experiment; options given here win over the preset's.

    Example:
        >>> config = preset("cub-5shot-5task-maml+gs", epochs=3)
        >>> config.dataset, config.shots, config.arm, config.inner_lr, config.epochs
        ('cub', 5, 'shared', 0.1, 3)
    """
    options = {option: value for option, (value, _) in described(name).items()}
    arm = options.pop("arm")
    return RunConfig(**{**options, **given}) if "arm" in given else with_arm(RunConfig(**{**options, **given}), arm)


def select(patterns: Iterable[str], arms: Sequence[str] = ()) -> list[Experiment]:
    """The experiments whose names match a pattern such as `cub-*-5task-*`, each once, in the order of the list.

    Args:
        patterns: names with `*`, `?` and `[...]`; one without `~` matches only the 96 presets.
        arms: take these arms of every experiment that matches, instead of the arms that the patterns name.
    """
    found = dict.fromkeys(one for pattern in patterns for one in _matching(pattern))
    if arms:
        found = dict.fromkeys(one._replace(arm=arm) for one in found for arm in arms)
    order = {one: number for number, one in enumerate(EVERY_ARM.values())}
    return sorted(found, key=lambda one: order.get(one, len(order)))


def matches(name: str, pattern: str) -> bool:
    """Whether a preset's name matches a pattern; one without `~` matches only names without it."""
    return ("~" in name) == ("~" in pattern) and fnmatchcase(name, pattern)


def _matching(pattern: str) -> list[Experiment]:
    original, _, arm = pattern.partition("~")
    if OWN.fullmatch(arm):
        return [one._replace(arm=arm) for one in _matching(original)]
    found = [one for name, one in EVERY_ARM.items() if matches(name, pattern)]
    if not found:
        if not re.search(r"[*?\[]", pattern):
            experiment(pattern)  # its error names the nearest preset
        raise UserError(f"no preset matches '{pattern}' (gradshare grid list shows them all)")
    return found
