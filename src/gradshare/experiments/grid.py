"""Cells of a grid: what each one trains, where it is, how far it is, from files alone, and their live display.

Imports nothing heavy.

A cell is a run in a folder of several: `GRID/NAME/seed-N` for a preset with a seed, `OUT/ARM` for an arm of a
comparison. Beside the runs, `GRID/.grid/` holds notes: `LABEL.plan.json`, the cell's options; `LABEL.progress.json`,
what its worker does now; `LABEL.failure.txt`, why it failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from gradshare.errors import UserError
from gradshare.experiments.presets import EVERY_ARM, Experiment
from gradshare.files import parse_json, read_text, record
from gradshare.method.variants import VARIANTS, variant
from gradshare.runs.config import RunConfig, grows
from gradshare.runs.display import REFRESH, Activity, State, View, read_lines
from gradshare.runs.folder import RunFolder
from gradshare.runs.records import Status

NOTES = ".grid"
PLAN = ".plan.json"
AT_WORK: tuple[Status, ...] = ("running", "failed", "diverged")
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
        """How far it is: a finished run that is to train longer is only stopped; a worker's failure counts."""
        status = self.run.status()
        if status == "done" and grows(self.run.options(), vars(self.config)):
            status = "running" if self.run.holder() else "stopped"
        return "failed" if status in ("stopped", "waiting") and self.note("failure.txt").exists() else status

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train; a run that diverged is not tried again."""
        return self.status in ("done", "diverged")

    @property
    def failure(self) -> str:
        """Why it failed, in a line; "" if it did not."""
        return failure_of(self.folder)

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


def failure_of(run: Path) -> str:
    """Why the last worker of a run failed, in a line; "" if it did not, or the run is in no grid."""
    for grid in (run.parent, run.parent.parent):
        path = grid / NOTES / f"{run.relative_to(grid)}.failure.txt"
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


def read_state(cell: Cell) -> State:
    """How far a cell is. A run whose files are damaged counts as failed: a table of many runs goes on."""
    try:
        status = cell.status
        activity = _read_activity(cell.note("progress.json")) if status == "running" else Activity()
        reason = cell.failure if status == "failed" else cell.divergence if status == "diverged" else ""
        return State(status, *read_lines(cell.folder), cell.config.epochs, activity, reason)
    except UserError as error:
        return State("failed", (), (), cell.config.epochs, reason=str(error))


def _read_activity(path: Path) -> Activity:
    try:
        return record(Activity, parse_json(read_text(path)), str(path))
    except (FileNotFoundError, ValueError):  # a display does not stop for a note that is gone again, or damaged
        return Activity()


def view(cells: Sequence[Cell], only: Sequence[Status] = ()) -> View:
    """What shows how far cells are; `only`: on a terminal, the status of those with a row in the table."""
    return View({cell.label: partial(read_state, cell) for cell in cells}, only)


def watch(cells: Sequence[Cell]) -> None:
    """Show all cells until every one is done, diverged or failed."""
    with view(cells) as shown:
        while any(state.status not in ("done", "diverged", "failed") for state in shown.states.values()):
            shown.update(shown.sources)
            time.sleep(REFRESH)
