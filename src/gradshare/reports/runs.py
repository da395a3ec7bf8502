"""Run folders on disk -> Run values. Nothing is computed here, only read and checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradshare.errors import UserError
from gradshare.experiments.grid import Cell, failure_of, planned
from gradshare.files import opened
from gradshare.reports.records import Json, Record, read_lines, read_object
from gradshare.reports.wording import Measure, arm_rank
from gradshare.runs.divergence import read_note, saturated
from gradshare.runs.finished import damage
from gradshare.runs.locks import holder

State = Literal["done", "running", "unfinished", "waiting", "failed", "diverged"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TestResult:
    """A mean over the test tasks; `accuracy` is NaN for regression."""

    accuracy: float
    loss: float
    interval: float
    epochs: tuple[int, ...]
    __test__ = False  # not a test case, whatever pytest makes of the name


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder. Absent values are NaN; a quantity that the arm does not have is None."""

    name: str
    """The arm, or the path below the reported folder where several runs have that arm."""
    arm: str
    folder: Path
    config: Json
    epochs: Ints  # [E], increasing, from 1, with gaps where lines are missing
    measure: Measure
    """What is compared: the accuracy, or for regression the loss."""
    val: Floats  # [E], of the measure
    interval: Floats  # [E], 95 % half-width over the validation tasks
    m: Floats | None  # [E, steps], after the sigmoid
    lam: Floats | None  # [E, steps], after the sigmoid
    timed_epochs: Ints  # [S]
    train_seconds: Floats  # [S]
    finished: bool
    state: State
    reason: str
    """Why it failed or diverged, in a line; "" if it did not."""
    test_tasks: int | None
    test_best: TestResult | None
    test_ensemble: TestResult | None
    summary: Json | None
    skipped: int = 0
    """Meta-steps that were not taken, since something was not finite."""
    diverged_tasks: int = 0
    """Validation tasks without a finite loss, in the epoch that has most."""
    saturated: str = ""
    """The first gate that is saturated, since when, and what that means; "" if none is."""
    damage: str = ""
    """What is not as it was when the run was finished; "" if all is."""


def read_run(folder: Path) -> Run:
    """Read one run folder; ValueError names the file and line that cannot be read."""
    folder = Path(folder)
    if not is_run(folder):
        raise UserError(f"no run in {folder}: it holds no config.json")
    config = _config(folder / "config.json")
    metrics = read_lines(folder / "metrics.jsonl")
    timings = read_lines(folder / "timings.jsonl")
    summary = read_object(folder / "summary.json") if (folder / "summary.json").exists() else None
    test = summary.inner("test") if summary else None
    arm = str(config.get("arm") or folder.resolve().name)
    measure = _measure(metrics)
    val = _floats([_value(record, measure) for record in metrics])
    note = read_note(folder)
    reason = failure_of(folder) if note is None else str(note)
    return Run(
        name=arm,
        arm=arm,
        folder=folder,
        config=config,
        epochs=np.array([record.count("epoch") for record in metrics], dtype=np.int64),
        measure=measure,
        val=val,
        interval=_finite([record.number("val_interval") for record in metrics]),
        m=_steps(metrics, "m"),
        lam=_steps(metrics, "lam"),
        timed_epochs=np.array([record.count("epoch") for record in timings], dtype=np.int64),
        train_seconds=_finite([record.number("train_seconds") for record in timings]),
        finished=(folder / "DONE").exists(),
        state=_state(folder, val, reason) if note is None else "diverged",
        reason=reason,
        test_tasks=test.count("tasks") if test and "tasks" in test.values else None,
        test_best=_test_result(test.inner("best")) if test else None,
        test_ensemble=_test_result(test.inner("ensemble")) if test else None,
        summary=summary.values if summary else None,
        skipped=sum(record.count_or_none("skipped") for record in metrics),
        diverged_tasks=max((record.count_or_none("val_diverged") for record in metrics), default=0),
        saturated=_saturated(metrics),
        damage=damage(folder),
    )


def _config(path: Path) -> Json:
    config = read_object(path).values
    try:
        json.dumps(config, allow_nan=False)  # the report's own summary.json will hold parts of it
        return opened(config) if "sha256" in config else config
    except ValueError as error:
        raise UserError(f"{path} was changed or is damaged: {error}") from None


def find_runs(folder: Path) -> list[Run]:
    """The run in `folder`, or the runs one and two levels below: the original, sharing, then the controls."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no run in {folder}: there is no such folder")
    if is_run(folder):
        return [read_run(folder)]
    runs = [read_run(path) for path in _run_folders_below(folder)]
    runs += [_not_begun(cell, runs[0].config if runs else {}) for cell in _planned(folder)]
    if not runs:
        raise UserError(f"no run in {folder}: neither it nor the two levels of folders below hold a config.json")
    if len({run.arm for run in runs}) < len(runs):  # an arm alone does not say which run
        runs = [replace(run, name=_path_name(run, folder)) for run in runs]
    return sorted(runs, key=lambda run: (arm_rank(run.arm), run.arm, run.folder.as_posix()))


def common_measure(runs: list[Run]) -> Measure:
    """What the runs are compared by; a run without epochs goes along with the others."""
    if not runs:
        raise UserError("no runs to compare")
    by_measure: dict[Measure, str] = {run.measure: run.name for run in runs if len(run.epochs)}
    if len(by_measure) > 1:
        raise UserError(
            f"{by_measure['accuracy']!r} has accuracies and {by_measure['loss']!r} has losses alone:"
            " report them in separate folders"
        )
    return next(iter(by_measure), "accuracy")


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _run_folders_below(folder: Path, levels: int = 2) -> list[Path]:
    found = []
    for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if is_run(child):
            found.append(child)
        elif levels > 1:
            found += _run_folders_below(child, levels - 1)
    return found


def _planned(folder: Path) -> list[Cell]:
    """The cells of a grid that have no run folder yet."""
    return [cell for cell in planned(folder) if not is_run(cell.folder)]


def _not_begun(cell: Cell, begun: Json) -> Run:
    """A planned cell as a run without epochs; what it leaves to the machine is as in a run that has begun."""
    options = asdict(cell.config)
    settled = {key: begun[key] for key, value in options.items() if value == "auto" and key in begun}
    nothing, none, reason = _floats([]), np.array([], dtype=np.int64), failure_of(cell.folder)
    return Run(
        name=cell.config.arm,
        arm=cell.config.arm,
        folder=cell.folder,
        config={**options, **settled},
        epochs=none,
        measure="accuracy",
        val=nothing,
        interval=nothing,
        m=None,
        lam=None,
        timed_epochs=none,
        train_seconds=nothing,
        finished=False,
        state=_state(cell.folder, nothing, reason),
        reason=reason,
        test_tasks=None,
        test_best=None,
        test_ensemble=None,
        summary=None,
    )


def _saturated(metrics: list[Record]) -> str:
    for record in metrics:
        gates = {gate: record.numbers(gate) for gate in ("m", "lam")}
        if found := saturated(gates):
            return f"since epoch {record.count('epoch')}, {found[0]}"
    return ""


def _state(folder: Path, val: Floats, reason: str) -> State:
    if (len(val) and not np.isfinite(val[-1])) or "the loss became" in reason:  # of old
        return "diverged"
    if (folder / "DONE").exists():
        return "done"
    if reason:
        return "failed"
    if holder(folder) is not None:
        return "running"
    return "unfinished" if is_run(folder) else "waiting"


def _path_name(run: Run, folder: Path) -> str:
    return run.folder.relative_to(folder).as_posix()


def _measure(metrics: list[Record]) -> Measure:
    accuracies = [record.values.get("val_accuracy") for record in metrics]
    return "loss" if metrics and all(accuracy is None for accuracy in accuracies) else "accuracy"


def _value(record: Record, measure: Measure) -> float:
    return record.fraction("val_accuracy") if measure == "accuracy" else record.number("val_loss")


def _steps(metrics: list[Record], key: str) -> Floats | None:
    rows = [record.numbers(key) for record in metrics]
    steps = next((len(row) for row in rows if row is not None), 0)
    if not steps:
        return None
    for record, row in zip(metrics, rows, strict=True):
        if row is not None and len(row) != steps:
            raise UserError(f"{record.where}: {key} has {len(row)} inner steps, and the lines before have {steps}")
    return np.array([row or [np.nan] * steps for row in rows], dtype=np.float64)


def _test_result(record: Record | None) -> TestResult | None:
    if record is None:
        return None
    epochs = record.numbers("epochs") or ([record.number("epoch")] if "epoch" in record.values else [])
    whole = tuple(int(epoch) for epoch in epochs if np.isfinite(epoch))
    return TestResult(record.fraction("accuracy"), record.number("loss"), record.number("interval"), whole)


def _floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _finite(values: list[float]) -> Floats:
    """Absent where it is infinite: an interval or a time that nothing can be computed with."""
    found = _floats(values)
    return np.where(np.isfinite(found), found, np.nan)
