"""A cell of a grid: an experiment with a seed. What it is, where it is, and how far it is, from files alone.

A cell's run folder is `GRID/NAME/seed-N`. Beside it, in `GRID/.grid/NAME/`, are notes: `seed-N.plan.json`, its options;
`seed-N.progress.json`, where its worker is; `seed-N.failure.txt`, why it failed. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gradshare.config import RunConfig, read_config, run_config
from gradshare.errors import UserError
from gradshare.locks import holder
from gradshare.presets import EVERY_ARM

NOTES = ".grid"
Note = Literal["plan.json", "progress.json", "failure.txt"]
Condition = Literal["running", "stopped", "failed", "waiting", "done"]


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
        return (self.folder / "DONE").exists()

    @property
    def failure(self) -> str:
        """Why the cell failed, in a line; "" if it did not."""
        try:
            return self.note("failure.txt").read_text(encoding="utf-8").partition("\n")[0]
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
            cells.append(Cell(grid, path.parent.name, RunConfig(**json.loads(path.read_text(encoding="utf-8")))))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged, or of another version of gradshare: {error}") from None
    if not cells:
        raise UserError(f"there is no grid in {grid}: gradshare grid run PATTERN --out {grid} makes one")
    return sorted(cells, key=lambda cell: (order.get(cell.name, len(order)), cell.name, cell.config.seed))


def taken_up(cell: Cell) -> Cell:
    """The cell with what its begun run settled for the machine (device, threads, ...); refuses other options than its.

    A run goes on with the device and the threads that it began with, wherever it is taken up.
    """
    if not (cell.folder / "config.json").exists():
        return cell
    stored = asdict(run_config(read_config(cell.folder), cell.folder))
    settled = {name: stored[name] for name, value in asdict(cell.config).items() if value == "auto"}
    if cell.config.threads == 0:
        settled["threads"] = stored["threads"]
    cell = replace(cell, config=replace(cell.config, **settled))
    for name, value in asdict(cell.config).items():
        if value != stored[name]:
            raise UserError(
                f"{cell.folder} was begun with {name} = {stored[name]!r}, not {value!r};"
                " give the same options as then, or another --out"
            )
    return cell


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
    now: str = ""  # what a running cell does; why a failed one failed

    @property
    def epoch(self) -> int:
        return len(self.metrics)


def read_state(cell: Cell) -> State:
    """Read the files of a cell."""
    metrics, timings = (_lines(cell.folder / f"{name}.jsonl") for name in ("metrics", "timings"))
    condition = _condition(cell)
    progress = _object(cell.note("progress.json")) if condition == "running" else {}
    accuracies = [line["val_accuracy"] for line in metrics if line.get("val_accuracy") is not None]
    seconds = [line["train_seconds"] + line["val_seconds"] for line in timings]
    newest = seconds[-5:]
    each = sum(newest) / len(newest) if newest else progress.get("epoch_seconds")
    left = None
    if each is not None and condition != "done":
        left = max(0.0, each * (cell.config.epochs - len(metrics) - progress.get("share", 0.0)))
    now = cell.failure if condition == "failed" else progress.get("now", "")
    return State(condition, metrics, seconds, cell.config.epochs, max(accuracies, default=None), each, left, now)


def _condition(cell: Cell) -> Condition:
    checks: dict[Condition, Callable[[], bool]] = {
        "done": lambda: cell.done,
        "running": lambda: holder(cell.folder) is not None,
        "failed": lambda: cell.note("failure.txt").exists(),
        "stopped": lambda: (cell.folder / "config.json").exists(),
    }
    return next((condition for condition, holds in checks.items() if holds()), "waiting")


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
