"""Cells trained on this machine, each in a process of its own."""

from __future__ import annotations

import os
from typing import Self

from gradshare.experiments.cells import Cell
from gradshare.experiments.work import CODES, Outcome, in_process
from gradshare.runs.workers import Processes


class Local:
    """Trains some cells at a time."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.processes = Processes()
        self.cells: dict[str, Cell] = {}

    def __enter__(self) -> Self:
        self.processes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.processes.__exit__(*error)

    @property
    def busy(self) -> int:
        return len(self.cells)

    @property
    def room(self) -> bool:
        return len(self.cells) < self.jobs

    def start(self, cell: Cell) -> None:
        self.processes.start(cell.label, in_process, cell, os.getpid())
        self.cells[cell.label] = cell

    def ask_to_stop(self) -> None:
        self.processes.ask_to_stop()

    def ended(self) -> list[tuple[Cell, Outcome, str]]:
        outcomes = {code: outcome for outcome, code in CODES.items()}
        return [
            (self.cells.pop(label), outcomes.get(code, "died"), f"signal {-code}" if code < 0 else f"exit code {code}")
            for label, code in self.processes.ended().items()
        ]
