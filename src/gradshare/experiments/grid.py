"""Cells of a grid: what each one trains, where it is, and how far it is, from files alone. Imports nothing heavy.

A cell is a run in a folder of several: `GRID/NAME/seed-N` for a preset with a seed, `OUT/ARM` for an arm of a
comparison. Beside the runs, `GRID/.grid/` holds notes: `LABEL.plan.json`, the cell's options; `LABEL.progress.json`,
what its worker does now; `LABEL.failure.txt`, why it failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gradshare.errors import UserError
from gradshare.experiments.presets import EVERY_ARM, Experiment
from gradshare.files import parse_json, read_text, record
from gradshare.method.variants import VARIANTS, variant
from gradshare.runs.config import RunConfig, Training
from gradshare.runs.folder import METRICS, TIMINGS, RunFolder
from gradshare.runs.records import Epoch, Status

NOTES = ".grid"
PLAN = ".plan.json"
Note = Literal["plan.json", "progress.json", "failure.txt"]


@dataclass(frozen=True)
class Cell:
    """One run of a grid or of a comparison."""

    grid: Path
    label: str  # the path of its run folder below the grid
    config: RunConfig

    @classmethod
    def of_preset(cls, grid: Path, one: Experiment, config: RunConfig) -> Cell:
        return cls(grid, f"{one.name}/seed-{config.seed}", config)

    @classmethod
    def of_arm(cls, out: Path, config: RunConfig) -> Cell:
        return cls(out, variant(config.arm).label, config)

    @property
    def name(self) -> str:
        """The preset in a grid, the arm in a comparison."""
        return self.label.partition("/")[0]

    @property
    def folder(self) -> Path:
        return self.grid / self.label

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def status(self) -> Status:
        """How far it is: a finished run that is to have more epochs is only stopped; a worker's failure counts."""
        status = self.run.status()
        if status == "done" and self.run.options().get("epochs", 0) < self.config.epochs:
            status = "running" if self.run.holder() else "stopped"
        return "failed" if status in ("stopped", "waiting") and self.note("failure.txt").exists() else status

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train; a run that diverged is not tried again."""
        return self.status in ("done", "diverged")

    @property
    def failure(self) -> str:
        """Why it failed, in a line; "" if it did not."""
        return failure_of(self.folder, self.grid)

    @property
    def divergence(self) -> str:
        """Why its run was stopped; "" if it did not diverge."""
        found = self.run.divergence()
        return "" if found is None else str(found)

    def note(self, kind: Note) -> Path:
        return self.grid / NOTES / f"{self.label}.{kind}"

    def write(self, kind: Note, text: str) -> None:
        """Write a note so that a reader finds all of it or none."""
        path = self.note(kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def remove_notes(self, *kinds: Note) -> None:
        for kind in kinds:
            self.note(kind).unlink(missing_ok=True)

    def plan(self) -> None:
        """Add the cell to its grid."""
        self.write("plan.json", json.dumps(asdict(self.config), indent=1))

    def withdraw(self) -> None:
        """Take an arm whose run never began out of its comparison again."""
        if not self.run.exists():
            self.remove_notes("plan.json", "progress.json", "failure.txt")
            with suppress(OSError):  # there are notes of others
                (self.grid / NOTES).rmdir()


def failure_of(run: Path, grid: Path | None = None) -> str:
    """Why the last worker of a run failed, in a line; "" if it did not, or the run is in no grid.

    Args:
        grid: the folder of the grid; by default the run's parent or the one above it.
    """
    for parent in (run.parent, run.parent.parent) if grid is None else (grid,):
        path = parent / NOTES / f"{run.relative_to(parent)}.failure.txt"
        if path.exists():
            return read_text(path).partition("\n")[0] or "it gave no reason"
    return ""


def planned(grid: Path) -> list[Cell]:
    """All cells of a grid or a comparison, begun or not, in the order of presets and arms; none if it has no plan."""
    cells = []
    for path in (grid / NOTES).rglob(f"*{PLAN}"):
        try:
            config = RunConfig(**parse_json(read_text(path)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged, or of another version of gradshare: {error}") from None
        cells.append(Cell(grid, path.relative_to(grid / NOTES).as_posix().removesuffix(PLAN), config))
    order = {name: number for number, name in enumerate((*VARIANTS, *EVERY_ARM))}
    return sorted(cells, key=lambda cell: (order.get(cell.name, len(order)), cell.name, cell.config.seed))


@dataclass(frozen=True)
class Activity:
    """What a run does now."""

    share: float = 0.0  # of the epoch's iterations
    now: str = ""
    epoch_seconds: float | None = None  # that an epoch's iterations will take


@dataclass(frozen=True)
class State:
    """How far a run is."""

    status: Status
    epochs: tuple[Epoch, ...]  # finished
    seconds: tuple[float, ...]  # of each epoch finished, with validation
    wanted: int  # epochs in all
    activity: Activity = Activity()
    reason: str = ""  # why it failed or diverged

    @property
    def best(self) -> float | None:
        """The best validation accuracy."""
        return max((epoch.val_accuracy for epoch in self.epochs if epoch.val_accuracy is not None), default=None)

    @property
    def epoch_seconds(self) -> float | None:
        """What an epoch takes: the mean of the newest five."""
        newest = self.seconds[-5:]
        return sum(newest) / len(newest) if newest else self.activity.epoch_seconds

    @property
    def seconds_left(self) -> float | None:
        each = self.epoch_seconds
        if each is None or self.status in ("done", "diverged"):
            return None
        return max(0.0, each * (self.wanted - len(self.epochs) - self.activity.share))


def read_state(cell: Cell) -> State:
    """How far a cell is. A run whose files are damaged counts as failed: a table of many runs goes on."""
    try:
        status = cell.status
        activity = _read_activity(cell.note("progress.json")) if status == "running" else Activity()
        reason = cell.failure if status == "failed" else cell.divergence if status == "diverged" else ""
        return State(status, *_lines(cell.folder, _stamps(cell.folder)), cell.config.epochs, activity, reason)
    except UserError as error:
        return State("failed", (), (), cell.config.epochs, reason=str(error))


def read_run(run: RunFolder, wanted: int, activity: Activity) -> State:
    """How far a run is that this process trains; training itself repairs or names damaged files."""
    try:
        return State(run.status(), *_lines(run.path, _stamps(run.path)), wanted, activity)
    except UserError as error:
        return State("stopped", (), (), wanted, activity, str(error))


def _stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Changes when a file with a line for each epoch is written anew."""
    paths = [path for path in (folder / METRICS, folder / TIMINGS) if path.exists()]
    return tuple((found.st_mtime_ns, found.st_size) for found in map(Path.stat, paths))


@lru_cache(maxsize=1024)  # a display reads hundreds of runs every second, and a line is new once in an epoch
def _lines(folder: Path, stamps: tuple[tuple[int, int], ...]) -> tuple[tuple[Epoch, ...], tuple[float, ...]]:
    run = RunFolder(folder)
    return tuple(run.epochs()), tuple(timing.train_seconds + timing.val_seconds for timing in run.timings())


def _read_activity(path: Path) -> Activity:
    try:
        return record(Activity, parse_json(read_text(path)), str(path))
    except (FileNotFoundError, ValueError):  # a display does not stop for a note that is gone again, or damaged
        return Activity()


class Follower:
    """The display of a run: passes on what the run does now, about twice a second and after every epoch."""

    PAUSE = 0.5  # seconds

    def __init__(self, training: Training, pass_on: Callable[[Activity], None]) -> None:
        self.iterations, self.pass_on = training.iterations, pass_on
        self.began: tuple[int, int, float] | None = None  # epoch, iteration and time of its first iteration seen
        self.epoch_seconds: float | None = None
        self.passed_on = 0.0

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        now = time.monotonic()
        if self.began is None or self.began[0] != epoch:
            self.began = (epoch, iteration, now)
        elif iteration > self.began[1]:
            self.epoch_seconds = (now - self.began[2]) / (iteration - self.began[1]) * self.iterations
        self._pass_on(iteration / self.iterations, f"{iteration}/{self.iterations}")

    def evaluating(self, split: str, done: int, total: int) -> None:
        self._pass_on(1.0, f"{split} {done}/{total}")

    def epoch(self, *_: Any) -> None:
        self.passed_on = 0.0
        self._pass_on(0.0, "")

    def _pass_on(self, share: float, now: str) -> None:
        if time.monotonic() - self.passed_on >= self.PAUSE:
            self.passed_on = time.monotonic()
            self.pass_on(Activity(share, now, self.epoch_seconds))
