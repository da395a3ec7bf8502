"""The driver of a grid: starts cells, waits for them, tries again where a worker died, goes on where one failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gradshare.experiments.cells import Cell
from gradshare.experiments.work import Outcome
from gradshare.runs.interruption import Interrupted, stop_requests
from gradshare.runs.locks import holder

TICK = 0.2  # seconds


class Engine(Protocol):
    """Where cells are trained: processes of this machine, or Ray."""

    @property
    def busy(self) -> int: ...  # cells started and not ended
    @property
    def room(self) -> bool: ...  # for one more
    def start(self, cell: Cell) -> None: ...
    def ask_to_stop(self) -> None: ...
    def ended(self) -> list[tuple[Cell, Outcome, str]]: ...  # since the last call, with words on how


class Screen(Protocol):
    def update(self) -> None: ...
    def say(self, text: str) -> None: ...


def drive(cells: Sequence[Cell], engine: Engine, screen: Screen, retries: int, folder: Path) -> list[Cell]:
    """Train cells; gives those that failed. A polite stop raises `Interrupted`.

    A cell that another process trains is waited for, and taken over if that process goes without finishing it.
    """
    grid = _Grid(list(cells), engine, screen, retries)
    with stop_requests() as stop:
        try:
            while engine.busy or (grid.waiting and not stop()):
                grid.tick(stop)
        except KeyboardInterrupt:  # the second
            raise Interrupted(folder, "at once, after the last checkpoints") from None
        if stop():
            raise Interrupted(folder, "between iterations")
    return grid.failed


class _Grid:
    """The cells of a grid on their way."""

    def __init__(self, waiting: list[Cell], engine: Engine, screen: Screen, retries: int) -> None:
        self.waiting, self.engine, self.screen, self.retries = waiting, engine, screen, retries
        self.failed: list[Cell] = []
        self.deaths: Counter[str] = Counter()
        self.elsewhere: set[str] = set()

    def tick(self, stop: Callable[[], bool]) -> None:
        if stop():
            self.engine.ask_to_stop()
        else:
            self.start()
        self.screen.update()
        time.sleep(TICK)
        for ended in self.engine.ended():
            self.end(*ended, stop)

    def start(self) -> None:
        for cell in list(self.waiting):
            if not self.engine.room:
                return
            if cell.ended:  # by another driver
                self.waiting.remove(cell)
            elif (other := holder(cell.folder)) is not None:
                if cell.label not in self.elsewhere:
                    self.screen.say(f"{cell.label}: is being trained by {other}; waiting for it")
                self.elsewhere.add(cell.label)
            else:
                self.waiting.remove(cell)
                self.engine.start(cell)

    def end(self, cell: Cell, outcome: Outcome, how: str, stop: Callable[[], bool]) -> None:
        if outcome == "held":
            self.waiting.append(cell)
        elif outcome == "failed":
            self._fail(cell)
        elif outcome == "diverged":  # a result, not to be tried again
            self.screen.say(f"{cell.label}: diverged and was stopped: {cell.diverged}")
        elif outcome in ("died", "stopped") and not stop():  # "stopped": by somebody else
            self.deaths[cell.label] += 1
            if self.deaths[cell.label] <= self.retries:
                again = f"try {self.deaths[cell.label] + 1} of {self.retries + 1}"
                self.screen.say(f"{cell.label}: its worker ended ({how}); {again} goes on from the last checkpoint")
                self.waiting.insert(0, cell)
            else:
                cell.write("failure.txt", f"its worker ended ({how}) and there are no more tries\n")
                self._fail(cell)

    def _fail(self, cell: Cell) -> None:
        self.failed.append(cell)
        self.screen.say(f"{cell.label}: failed: {cell.failure}")
