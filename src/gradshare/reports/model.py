"""Runs as reports see them: read from their folders, and grouped into experiments and arms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradshare.errors import UserError
from gradshare.experiments.grid import Cell, failure_of, planned
from gradshare.method.variants import INNER, VARIANTS, Variant, variant
from gradshare.runs.config import FINGERPRINT, recorded
from gradshare.runs.divergence import saturated
from gradshare.runs.folder import Epoch, RunFolder, Score, Status, Test, find_runs

Measure = Literal["accuracy", "loss"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MACHINE = ("device", "engine", "threads", "eval_batch", "deterministic", "micro_batch", "checkpoint")
"""Options that do not change what is trained: repeats of an arm may differ in them, and in the seed."""
METHODS = {  # by the name in config.json, or of the function of gradshare, both without underscores
    "maml": "MAML",
    "metasgd": "Meta-SGD",
    "mamlpp": "MAML++",
    "mamlplusplus": "MAML++",
    "fomaml": "first-order MAML",
    "firstordermaml": "first-order MAML",
    "anil": "ANIL",
    "boil": "BOIL",
    "protomaml": "Proto-MAML",
    "reptile": "Reptile",
    "metacurvature": "Meta-Curvature",
    "sparsemaml": "sparse-MAML",
    "alfa": "ALFA",
}
INNER_CLASSES = {rule.partition(":")[2] for rule in INNER.values()}
DATA = {"cub": "cub", "cub-resize": "cub", "mini": "mini"}  # our stores, and the paper's data set in each


@dataclass(frozen=True, eq=False)
class Run:
    """One run. A value that was not recorded is NaN; a gate that the arm does not have is None."""

    name: str  # the arm, or the path below the reported folder if several runs have that arm
    variant: Variant
    folder: Path
    options: dict[str, Any]  # config.json
    status: Status
    reason: str  # why it failed or diverged
    measure: Measure  # loss: for regression
    epochs: Ints  # [E], increasing, from 1; lines may be missing
    val: Floats  # [E], of the measure
    interval: Floats  # [E], half the 95 % interval over the validation tasks
    m: Floats | None  # [E, steps], after the sigmoid
    lam: Floats | None  # [E, steps], after the sigmoid
    timed: Ints  # [S], epochs with a time
    seconds: Floats  # [S], of training
    test: Test | None
    skipped: int  # meta-steps not taken, because something was not finite
    diverged_tasks: int  # validation tasks without a finite loss, in the epoch that has most
    saturated: str  # the first gate that is saturated, since when, and what that means
    damage: str  # what has changed since the run was finished

    @property
    def arm(self) -> str:
        return self.variant.name

    @property
    def norm_statistics(self) -> str:
        """Of batch norm in validation and test: batch or support. Older runs do not say, and are all batch."""
        return str(self.options.get("norm_statistics", "batch"))

    @property
    def marks(self) -> dict[str, str]:
        """What a reader has to know before the numbers: a word or two each, and the reason in full."""
        steps, tasks = self.skipped, self.diverged_tasks
        found = [
            (self.status != "done", self.status, self.reason),
            (self.damage, "files changed", self.damage),
            (self.saturated, "gate saturated", self.saturated),
            (steps, "steps skipped", f"{count(steps, 'meta-step')} not taken, because something was not finite"),
            (tasks, "tasks diverged", f"up to {count(tasks, 'validation task')} without a finite loss"),
        ]
        return {mark: reason for holds, mark, reason in found if holds}

    @cached_property
    def best(self) -> int | None:
        """The index of the earliest epoch with the highest validation accuracy, or the lowest loss."""
        if not np.isfinite(self.val).any():
            return None
        return int(np.nanargmax(sign(self.measure) * self.val))

    @property
    def best_epoch(self) -> int | None:
        return None if self.best is None else int(self.epochs[self.best])

    @property
    def best_val(self) -> float | None:
        return None if self.best is None else float(self.val[self.best])

    @property
    def best_val_interval(self) -> float | None:
        return None if self.best is None else _known(self.interval[self.best])

    @property
    def last_epoch(self) -> int | None:
        return int(self.epochs[-1]) if len(self.epochs) else None

    @property
    def final_mean_m(self) -> float | None:
        return None if self.m is None else _known(self.m[-1].mean())

    @property
    def final_mean_lam(self) -> float | None:
        return None if self.lam is None else _known(self.lam[-1].mean())

    @property
    def seconds_per_epoch(self) -> float | None:
        return float(self.seconds.mean()) if len(self.seconds) else None

    @property
    def train_seconds(self) -> float | None:
        return None if self.last_epoch is None else self.seconds_until(self.last_epoch)

    def seconds_until(self, epoch: int) -> float | None:
        """Training seconds of the epochs up to one; None if one of them was not timed."""
        upto = self.timed <= epoch
        return float(self.seconds[upto].sum()) if upto.sum() == epoch else None

    def measured(self, score: Score | None) -> float | None:
        """A score's accuracy, or its loss for regression."""
        return None if score is None else score.accuracy if self.measure == "accuracy" else score.loss


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def sign(measure: Measure) -> int:
    """1 if more is better, -1 if less is."""
    return 1 if measure == "accuracy" else -1


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def text_of(value: Any) -> str:
    """A value of config.json as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


# Reading


def read_runs(folder: Path) -> list[Run]:
    """The run in a folder, or the runs and the planned cells of a grid below it, in the order of the arms."""
    if not folder.is_dir():
        raise UserError(f"no run in {folder}: there is no such folder")
    runs = [read_run(found) for found in find_runs(folder)]
    waiting = [cell for cell in planned(folder) if not cell.run.exists()]
    runs += [_not_begun(cell, runs[0].options if runs else {}) for cell in waiting]
    if not runs:
        raise UserError(f"no run in {folder}: neither it nor the folders below hold a config.json")
    if len({run.arm for run in runs}) < len(runs):
        runs = [replace(run, name=run.folder.relative_to(folder).as_posix()) for run in runs]
    order = {name: number for number, name in enumerate(VARIANTS)}
    return sorted(runs, key=lambda run: (order.get(run.arm, len(order)), run.arm, run.folder.as_posix()))


def read_run(folder: RunFolder, planned_options: dict[str, Any] | None = None) -> Run:
    """Read one run folder; a file that cannot be read raises a UserError that names it.

    Args:
        planned_options: of a run that has not begun.
    """
    options = folder.options() if planned_options is None else planned_options
    lines, timings, summary = folder.epochs(), folder.timings(), folder.summary()
    row = variant_of(options.get("arm") or folder.path.resolve().name)
    status, reason = _status(folder)
    no_accuracy = all(line.val_accuracy is None and line.train_accuracy is None for line in lines)
    measure: Measure = "loss" if lines and no_accuracy else "accuracy"
    return Run(
        name=row.name,
        variant=row,
        folder=folder.path,
        options=options,
        status=status,
        reason=reason,
        measure=measure,
        epochs=np.array([line.epoch for line in lines], dtype=np.int64),
        val=_floats(line.val_accuracy if measure == "accuracy" else line.val_loss for line in lines),
        interval=_floats(line.val_interval for line in lines),
        m=_gates([line.m for line in lines], folder),
        lam=_gates([line.lam for line in lines], folder),
        timed=np.array([line.epoch for line in timings], dtype=np.int64),
        seconds=_floats(line.train_seconds for line in timings),
        test=summary.test if summary else None,
        skipped=sum(line.skipped for line in lines),
        diverged_tasks=max((line.val_diverged for line in lines), default=0),
        saturated=_saturated(lines),
        damage=folder.damage(),
    )


def variant_of(arm: Any) -> Variant:
    """The row of an arm in the registry; an arm that gradshare does not know gets a row too."""
    name = text_of(arm)
    try:
        return variant(name)
    except UserError:
        return Variant(name, "", f"the arm {name}")


def _status(folder: RunFolder) -> tuple[Status, str]:
    """The status of a run, with what the worker of a grid left when it failed; and the reason."""
    status, failure = folder.status(), failure_of(folder.path)
    if status in ("stopped", "waiting") and failure:
        return "failed", failure
    divergence = folder.divergence() if status == "diverged" else None
    return status, "" if divergence is None else str(divergence)


def _not_begun(cell: Cell, begun: dict[str, Any]) -> Run:
    """A planned cell as a run without epochs; options that it leaves to the machine are those of a run that began."""
    options = recorded(asdict(cell.config))
    decided = {key: begun[key] for key, value in options.items() if value == "auto" and key in begun}
    return read_run(cell.run, {**options, **decided})


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _gates(rows: list[tuple[float, ...] | None], folder: RunFolder) -> Floats | None:
    sizes = {len(row) for row in rows if row}
    if len(sizes) > 1:
        raise UserError(f"{folder.path}: the number of inner steps changes from line to line of metrics.jsonl")
    steps = max(sizes, default=0)
    return np.array([row or [np.nan] * steps for row in rows], dtype=np.float64) if steps else None


def _saturated(lines: list[Epoch]) -> str:
    found = ((line.epoch, saturated(line)) for line in lines)
    return next((f"since epoch {epoch}, {gate}" for epoch, gate in found if gate), "")


# Experiments and arms


class Setting(NamedTuple):
    """What distinguishes experiments; each value as config.json has it, None if it has none."""

    dataset: Any
    inner_lr: Any  # of the original: an arm may take a fraction of it
    ways: Any
    shots: Any
    method: Any
    tasks: Any
    backbone: Any = None  # config.json has this and the next if they are not the default
    inner: Any = None
    head_start: Any = None
    adapt: Any = None
    start: Any = None
    gates: Any = None

    @property
    def title(self) -> str:
        """MAML/5 on cub, 5-way 5-shot, inner rate 0.1."""
        where = "" if self.dataset is None else f" on {text_of(self.dataset)}"
        rate = "" if self.inner_lr is None else f"inner rate {text_of(self.inner_lr)}"
        return ", ".join(part for part in (f"{self.row}{where}", self.shape, rate) if part)

    @property
    def row(self) -> str:
        """The name of a row in the paper's table: MAML/5 is MAML with 5 tasks in a batch; then what else it has."""
        name = "a run" if self.method is None else method_name(self.method)
        more = " and ".join(word.format(text_of(value)) for word, value in self.special if value is not None)
        return f"{name if self.tasks is None else f'{name}/{text_of(self.tasks)}'}{more and f' with {more}'}"

    @property
    def special(self) -> list[tuple[str, Any]]:
        """The options that most runs do not have, in words."""
        words = ("{}", "{}", "{} head", "{} adapted", "weights of {}", "gates x{}")
        values = (self.backbone, self.inner, self.head_start, self.adapt, self.start, self.gates)
        return [*zip(words, values, strict=True)]

    @property
    def shape(self) -> str:
        sizes = ((self.ways, "way"), (self.shots, "shot"))
        return " ".join(f"{text_of(value)}-{unit}" for value, unit in sizes if value is not None)

    @property
    def data(self) -> str:
        """The paper's data set, whichever of its stores was used."""
        return DATA.get(text_of(self.dataset), text_of(self.dataset))


def method_name(method: Any) -> str:
    return METHODS.get(text_of(method).replace("_", ""), text_of(method))


@dataclass(frozen=True, eq=False)
class Arm:
    """The runs of one arm that differ only in their seed."""

    name: str  # the arm; if it has several configurations here, with its epochs, or the first run's name
    runs: list[Run]

    @property
    def variant(self) -> Variant:
        return self.runs[0].variant

    @property
    def counted(self) -> list[Run]:
        """The runs to take means over: those that are done, or all if none is."""
        return [run for run in self.runs if run.status == "done"] or self.runs

    @property
    def done(self) -> int:
        return sum(run.status == "done" for run in self.runs)


@dataclass(frozen=True, eq=False)
class Experiment:
    setting: Setting
    runs: list[Run]

    @cached_property
    def arms(self) -> list[Arm]:
        """In the order of the runs. Seeds that trained for different numbers of epochs belong to one arm."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(_configuration(run), []).append(run)
        alike = [part for runs in found.values() for part in _one_run_a_seed(runs)]
        firsts = [runs[0] for runs in alike]
        return [Arm(_name(runs[0], firsts), runs) for runs in alike]

    def partner(self, run: Run, arm: str) -> Run | None:
        """The run of another arm to compare with: of the same seed, in the same folder, or the only one."""
        found = [other for other in self.runs if other.arm == arm]
        seeded = [other for other in found if other.options.get("seed") == run.options.get("seed")] or found
        beside = [other for other in seeded if other.folder.parent == run.folder.parent] or seeded
        return beside[0] if len(beside) == 1 else None


def group(runs: list[Run]) -> list[Experiment]:
    """The experiments of these runs, in the paper's order: data set, rate, shots, method, tasks."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(text_of(setting(run)), []).append(run)
    return sorted((Experiment(setting(members[0]), members) for members in found.values()), key=_order)


def setting(run: Run) -> Setting:
    """What the options of a run say; of a run from Python also what the fingerprint of its learner says."""
    learner = run.options.get(FINGERPRINT)
    options = (_made(learner) if isinstance(learner, dict) else {}) | run.options
    return Setting(**{key: options.get(key) for key in Setting._fields} | {"inner_lr": whole_rate(options)})


def _made(learner: dict[str, Any]) -> dict[str, Any]:
    method, _, head = text_of(learner.get("algorithm")).partition(", head_start ")
    inner = [link for link in learner.get("rule", ()) if text_of(link).partition("(")[0] in INNER_CLASSES]
    return {
        "method": method,
        "inner_lr": learner.get("inner_lr"),
        "inner": ", ".join(inner) or None,
        "head_start": None if head.startswith("prototypes") else head or None,
    }


def whole_rate(options: dict[str, Any]) -> Any:
    """The inner rate of the experiment: the half-rate control takes half of it."""
    rate, factor = options.get("inner_lr"), variant_of(options.get("arm")).rate
    return round(rate / factor, 12) if isinstance(rate, float) and factor != 1 else rate


def common_measure(runs: list[Run]) -> Measure:
    """What the runs are compared by; a run without epochs has no say."""
    names: dict[Measure, str] = {run.measure: run.name for run in runs if len(run.epochs)}
    if len(names) > 1:
        raise UserError(
            f"{names['accuracy']!r} has accuracies and {names['loss']!r} has only losses:"
            " report them in separate folders"
        )
    return next(iter(names), "accuracy")


def _configuration(run: Run) -> str:
    kept = {key: value for key, value in run.options.items() if key not in (*MACHINE, "seed", "epochs")}
    return text_of({**kept, "arm": run.arm})


def _one_run_a_seed(runs: list[Run]) -> list[list[Run]]:
    """The runs as one list, or by their epochs where a seed has longer and shorter ones."""
    seeds = [text_of(run.options.get("seed")) for run in runs]
    if len(set(seeds)) == len(seeds):
        return [runs]
    by_epochs: dict[str, list[Run]] = {}
    for run in runs:
        by_epochs.setdefault(text_of(run.options.get("epochs")), []).append(run)
    return list(by_epochs.values())


def _name(run: Run, others: list[Run]) -> str:
    """The shortest name that distinguishes an arm's configurations: shared; shared, 20 epochs; or a run's name."""
    epochs = [other.options.get("epochs") for other in others if other.arm == run.arm]
    own = run.options.get("epochs")
    if len(epochs) == 1:
        return run.arm
    return f"{run.arm}, {own} epoch{'s' * (own != 1)}" if type(own) is int and epochs.count(own) == 1 else run.name


def _order(one: Experiment) -> list[tuple[float, str]]:
    chosen, methods = one.setting, list(METHODS)
    method = text_of(chosen.method)
    rank = methods.index(method.replace("_", "")) if method.replace("_", "") in methods else len(methods)
    tasks, rest = sort_key(chosen.tasks)
    return [
        (0.0, chosen.data),
        *(sort_key(value) for value in (chosen.inner_lr, chosen.ways, chosen.shots)),
        (rank, method),
        (-tasks, rest),
        *((0.0, "" if value is None else text_of(value)) for _, value in chosen.special),
    ]


def sort_key(value: Any) -> tuple[float, str]:
    """Numbers by size, everything else by its text."""
    return (float(value), "") if isinstance(value, int | float) and abs(value) < 1e300 else (0.0, text_of(value))
