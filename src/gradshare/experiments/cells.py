"""A cell of a grid: an experiment with a seed. What it is, where it is, and how far it is, from files alone.

A cell's run folder is `GRID/NAME/seed-N`. Beside it, in `GRID/.grid/NAME/`, are notes: `seed-N.plan.json`, its options;
`seed-N.progress.json`, where its worker is; `seed-N.failure.txt`, why it failed. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gradshare.errors import MOST, UserError, shown
from gradshare.experiments.presets import EVERY_ARM
from gradshare.files import parse_json, read_text
from gradshare.runs.config import RunConfig, read_config
from gradshare.runs.divergence import read_note
from gradshare.runs.locks import holder

NOTES = ".grid"
Note = Literal["plan.json", "progress.json", "failure.txt"]
Condition = Literal["running", "stopped", "failed", "diverged", "waiting", "done"]


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    grid: Path
    name: str  # of the preset
    config: RunConfig

    @property
    def label(self) -> str:
        return f"{self.name}/seed-{self.config.seed}"

    @property
    def folder(self) -> Path:
        return self.grid / self.label

    @property
    def done(self) -> bool:
        """Whether it is finished, and no longer run is asked for."""
        if not (self.folder / "DONE").exists():
            return False
        epochs = read_config(self.folder).get("epochs") if (self.folder / "config.json").exists() else None
        return type(epochs) is not int or epochs >= self.config.epochs

    @property
    def diverged(self) -> str:
        """Why the cell's run was stopped, where its numbers were no longer finite; "" if they are."""
        note = read_note(self.folder)
        return "" if note is None else str(note)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train."""
        return self.done or bool(self.diverged)

    @property
    def failure(self) -> str:
        """Why the cell failed, in a line; "" if it did not."""
        try:
            return read_text(self.note("failure.txt")).partition("\n")[0]
        except FileNotFoundError:
            return ""

    def note(self, kind: Note) -> Path:
        return self.grid / NOTES / f"{self.label}.{kind}"

    def write(self, kind: Note, text: str) -> None:
        """Write a note, whole or not at all."""
        path = self.note(kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def forget(self) -> None:
        """Remove the notes of a worker, for the next one."""
        self.note("failure.txt").unlink(missing_ok=True)
        self.note("progress.json").unlink(missing_ok=True)

    def plan(self) -> None:
        """Note the cell as one of its grid."""
        self.write("plan.json", json.dumps(asdict(self.config), indent=1))


def planned(grid: Path) -> list[Cell]:
    """All cells of a grid, in the order of the presets."""
    order = {name: number for number, name in enumerate(EVERY_ARM)}
    cells = []
    for path in (grid / NOTES).glob("*/seed-*.plan.json"):
        try:
            cells.append(Cell(grid, path.parent.name, RunConfig(**parse_json(read_text(path)))))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged, or of another version of gradshare: {error}") from None
    if not cells:
        raise UserError(f"there is no grid in {grid}: gradshare grid run PATTERN --out {grid} makes one")
    return sorted(cells, key=lambda cell: (order.get(cell.name, len(order)), cell.name, cell.config.seed))


@dataclass(frozen=True)
class State:
    """How far a cell is."""

    condition: Condition
    metrics: list[dict[str, Any]]  # a line for each epoch finished
    seconds: list[float]  # of each epoch finished, validation too
    epochs: int
    best: float | None  # validation accuracy
    epoch_seconds: float | None
    seconds_left: float | None
    now: str = ""  # what a running cell does; why a failed or diverged one is

    @property
    def epoch(self) -> int:
        return len(self.metrics)


def read_state(cell: Cell) -> State:
    """Read the files of a cell."""
    metrics = _lines(cell.folder / "metrics.jsonl", ("epoch",))
    timings = _lines(cell.folder / "timings.jsonl", ("train_seconds", "val_seconds"))
    condition = _condition(cell)
    progress = _object(cell.note("progress.json")) if condition == "running" else {}
    accuracies = [line["val_accuracy"] for line in metrics if line.get("val_accuracy") is not None]
    seconds = [line["train_seconds"] + line["val_seconds"] for line in timings]
    newest = seconds[-5:]
    each = sum(newest) / len(newest) if newest else progress.get("epoch_seconds")
    left = None
    if each is not None and condition not in ("done", "diverged"):
        left = max(0.0, each * (cell.config.epochs - len(metrics) - progress.get("share", 0.0)))
    reasons = {"failed": cell.failure, "diverged": cell.diverged}
    now = reasons.get(condition, progress.get("now", ""))
    return State(condition, metrics, seconds, cell.config.epochs, max(accuracies, default=None), each, left, now)


def _condition(cell: Cell) -> Condition:
    checks: dict[Condition, Callable[[], bool]] = {
        "done": lambda: cell.done,
        "running": lambda: holder(cell.folder) is not None,
        "diverged": lambda: bool(cell.diverged),
        "failed": lambda: cell.note("failure.txt").exists(),
        "stopped": lambda: (cell.folder / "config.json").exists(),
    }
    return next((condition for condition, holds in checks.items() if holds()), "waiting")


def _lines(path: Path, numbers: tuple[str, ...]) -> list[dict[str, Any]]:
    try:
        return [_line(text, numbers) for text in read_text(path).splitlines()]
    except FileNotFoundError:
        return []
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _line(text: str, numbers: tuple[str, ...]) -> dict[str, Any]:
    """A line of metrics or timings in which those values, which we compute with, are numbers."""
    line = parse_json(text)
    wrong = [name for name in numbers if not isinstance(line, dict) or not _is_number(line.get(name))]
    if wrong:
        raise ValueError(f"a line without a number for {wrong[0]}")
    if not _is_number(line.get("val_accuracy") or 0):
        raise ValueError(f"val_accuracy is {shown(line['val_accuracy'])}")
    return line


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST


def _object(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path))
    except (FileNotFoundError, ValueError):
        return {}
    sound = isinstance(found, dict) and _is_number(found.get("share")) and _is_number(found.get("epoch_seconds") or 0)
    return found if sound else {}
