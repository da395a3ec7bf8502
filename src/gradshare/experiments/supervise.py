"""Train the cells of a grid: start them, wait for them, retry those whose worker died, and collect those that failed.

Cells are trained by an engine: `Local`, processes of this machine, or `gradshare.experiments.ray.Ray`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

from gradshare.errors import TOO_LITTLE_MEMORY, UserError, out_of_memory, print_warnings_as_lines
from gradshare.experiments.grid import Cell
from gradshare.runs.build import run
from gradshare.runs.config import Log
from gradshare.runs.display import Follower, View
from gradshare.runs.divergence import Diverged
from gradshare.runs.locks import FolderLocked
from gradshare.runs.workers import Interrupted, become_worker, stop_requests

Outcome = Literal["done", "failed", "refused", "stopped", "held", "diverged", "died"]
CODES: dict[Outcome, int] = {"done": 0, "failed": 1, "refused": 2, "stopped": 3, "held": 4, "diverged": 5}
"""Exit codes of a worker process. "refused": the user can mend it. "died": any other code, or a signal."""
TICK = 0.1  # seconds


class Ended(NamedTuple):
    """A cell whose worker ended."""

    cell: Cell
    outcome: Outcome
    how: str = ""  # for one that died: its exit code or signal


class Engine(Protocol):
    """Where cells are trained."""

    @property
    def busy(self) -> Sequence[Cell]: ...  # started and not ended
    @property
    def room(self) -> bool: ...  # for one more
    def start(self, cell: Cell) -> None: ...
    def ask_to_stop(self) -> None: ...
    def ended(self) -> list[Ended]: ...  # since the last call


class Failure(NamedTuple):
    """A cell that could not be trained."""

    cell: Cell
    reason: str
    mendable: bool  # by the user; otherwise its worker died, or its error was not foreseen


def supervise(cells: Sequence[Cell], engine: Engine, screen: View, retries: int, folder: Path) -> list[Failure]:
    """Train cells; returns those that failed. A polite stop raises `Interrupted`.

    A cell that another process trains is waited for, and trained here if that process ends without finishing it.
    """
    supervisor = _Supervisor(list(cells), engine, screen, retries)
    with stop_requests() as stop:
        try:
            while engine.busy or (supervisor.waiting and not stop()):
                supervisor.tick(stop)
        except KeyboardInterrupt:  # the second request
            raise Interrupted(folder, "at once, after the last checkpoints") from None
        if stop():
            raise Interrupted(folder, "between iterations")
    return supervisor.failures


class _Supervisor:
    def __init__(self, waiting: list[Cell], engine: Engine, screen: View, retries: int) -> None:
        self.waiting, self.engine, self.screen, self.retries = waiting, engine, screen, retries
        self.failures: list[Failure] = []
        self.deaths: Counter[str] = Counter()
        self.elsewhere: set[str] = set()

    def tick(self, stop: Callable[[], bool]) -> None:
        if stop():
            self.engine.ask_to_stop()
        else:
            self.start()
        self.screen.update([*(cell.label for cell in self.engine.busy), *self.elsewhere])
        time.sleep(TICK)
        for ended in self.engine.ended():
            self.end(ended, stop())
            self.screen.update([ended.cell.label])

    def start(self) -> None:
        for cell in list(self.waiting):
            if not self.engine.room:
                return
            if cell.ended:  # another supervisor trained it
                self.waiting.remove(cell)
            elif (other := cell.run.holder()) is not None:
                if cell.label not in self.elsewhere:
                    self.screen.say(f"{cell.label}: {other} trains it; waiting")
                self.elsewhere.add(cell.label)
            else:
                self.waiting.remove(cell)
                self.elsewhere.discard(cell.label)
                self.engine.start(cell)

    def end(self, ended: Ended, stopping: bool) -> None:
        cell, outcome, how = ended
        if outcome == "held":
            self.waiting.append(cell)
        elif outcome == "diverged":  # a result
            self.screen.say(f"{cell.label}: diverged and was stopped: {cell.divergence}")
        elif outcome in ("failed", "refused"):
            self.fail(cell, cell.failure, outcome == "refused")
        elif outcome in ("died", "stopped") and not stopping:  # "stopped": by somebody else
            self.retry(cell, how)

    def retry(self, cell: Cell, how: str) -> None:
        self.deaths[cell.label] += 1
        tries = self.deaths[cell.label]
        if tries <= self.retries:
            self.screen.say(
                f"{cell.label}: its worker ended ({how});"
                f" try {tries + 1} of {self.retries + 1} goes on from the last checkpoint"
            )
            self.waiting.insert(0, cell)
        else:
            reason = f"its worker ended ({how}), {tries} times"
            cell.write("failure.txt", f"{reason}\n")
            self.fail(cell, reason, mendable=False)

    def fail(self, cell: Cell, reason: str, mendable: bool) -> None:
        self.failures.append(Failure(cell, reason, mendable))
        self.screen.say(f"{cell.label}: failed: {reason}")


def train_cell(cell: Cell, allowed: Sequence[str] = (), log: Log | None = None) -> Outcome:
    """Train a cell, or go on with it. Never raises an error: the outcome and the cell's notes hold it.

    Args:
        allowed: arms of the user's own that may be imported.
        log: where else the numbers go.
    """
    if cell.run.holder() is not None:
        return "held"
    cell.remove_notes("failure.txt", "progress.json")  # of an earlier worker
    follower = Follower(cell.config, lambda activity: cell.write("progress.json", json.dumps(asdict(activity))))
    try:
        run(cell.config, cell.folder, resume=None, display=follower, allowed=allowed, log=log)
    except FolderLocked:  # since a moment ago: the notes are the other worker's
        return "held"
    except (Interrupted, Diverged) as end:
        cell.remove_notes("progress.json")
        return "stopped" if isinstance(end, Interrupted) else "diverged"
    except Exception as error:
        cell.remove_notes("progress.json")
        return _note_failure(cell, error)
    cell.remove_notes("progress.json")
    return "done"


def _note_failure(cell: Cell, error: Exception) -> Outcome:
    """Write why a cell failed: one line, and for an error that was not foreseen the traceback."""
    if isinstance(error, UserError) or out_of_memory(error):
        reason = str(error) if isinstance(error, UserError) else TOO_LITTLE_MEMORY
        cell.write("failure.txt", " ".join(reason.split()) + "\n")
        return "refused"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    cell.write("failure.txt", f"{reason}\n\n{traceback.format_exc()}")
    return "failed"


class Local:
    """Trains cells in processes of this machine, some at a time. Those at work when the block ends are killed."""

    def __init__(self, jobs: int, allowed: Sequence[str] = (), log: Log | None = None) -> None:
        self.jobs, self.allowed, self.log = jobs, allowed, log
        self.workers: dict[Cell, SpawnProcess] = {}
        self.asked: set[Cell] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.workers.values():
            process.kill()
            process.join()

    @property
    def busy(self) -> Sequence[Cell]:
        return list(self.workers)

    @property
    def room(self) -> bool:
        return len(self.workers) < self.jobs

    def start(self, cell: Cell) -> None:
        """Start a worker that ignores Ctrl-C.

        Ctrl-C reaches every process of the terminal. Only the parent answers it, and asks its workers to stop.
        """
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(cell, self.allowed, self.log))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child inherits what is ignored
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        self.workers[cell] = process

    def ask_to_stop(self) -> None:
        """Ask every worker, once, to save and end."""
        for cell, process in self.workers.items():
            if cell not in self.asked:
                process.terminate()
                self.asked.add(cell)

    def ended(self) -> list[Ended]:
        codes = {cell: process.exitcode for cell, process in self.workers.items() if process.exitcode is not None}
        for cell in codes:
            del self.workers[cell]
            self.asked.discard(cell)
        return [Ended(cell, _outcome(code), _words(code)) for cell, code in codes.items()]


def _outcome(code: int) -> Outcome:
    return next((outcome for outcome, known in CODES.items() if known == code), "died")


def _words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _work(cell: Cell, allowed: Sequence[str], log: Log | None) -> None:
    """The whole life of a worker process."""
    become_worker()
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    print_warnings_as_lines()
    outcome = train_cell(cell, allowed, log)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CODES[outcome])  # all is saved; Python takes a second of CPU time to take PyTorch apart


def _stop_without_parent() -> None:
    """Wait until the parent process is gone, however it ended; then have this one save and stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # by a pipe that the system closes when the parent is gone
    os.kill(os.getpid(), signal.SIGTERM)
