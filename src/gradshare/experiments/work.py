"""One cell in a worker: trained from where it is, saying how far it is in its notes."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from contextlib import closing
from typing import Any, Literal

from gradshare.errors import UserError, say_warnings_plainly
from gradshare.experiments.cells import Cell
from gradshare.runs.build import run
from gradshare.runs.divergence import Diverged
from gradshare.runs.interruption import Interrupted
from gradshare.runs.locks import Held, holder

Outcome = Literal["done", "failed", "stopped", "held", "diverged", "died"]
CODES: dict[Outcome, int] = {"done": 0, "failed": 1, "stopped": 3, "held": 4, "diverged": 5}  # of a worker process
PAUSE = 0.5  # seconds between two notes on the progress


def train_cell(cell: Cell, parent: int | None = None) -> Outcome:
    """Train a cell, or go on with it; whatever happens is told by the outcome and by the cell's notes.

    Args:
        parent: the process without which this one is to save and stop.
    """
    progress = ProgressNotes(cell, parent)
    if holder(cell.folder) is not None:
        return "held"
    cell.forget()  # what an earlier worker noted
    try:
        with closing(progress):
            run(cell.config, cell.folder, resume=None, display=progress)
        return "done"
    except Interrupted:
        return "stopped"
    except Held:  # just now: the notes are the other's
        return "held"
    except Diverged:
        return "diverged"
    except UserError as error:
        cell.write("failure.txt", " ".join(str(error).split()) + "\n")
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        cell.write("failure.txt", f"{reason}\n\n{traceback.format_exc()}")
    return "failed"


def in_process(cell: Cell, parent: int) -> None:
    """`train_cell` as a process's whole life: the exit code is the outcome."""
    say_warnings_plainly()
    raise SystemExit(CODES[train_cell(cell, parent)])


class ProgressNotes:
    """Notes where a cell's run is, about twice a second; and has it stop when the parent process is gone."""

    def __init__(self, cell: Cell, parent: int | None) -> None:
        self.cell, self.parent = cell, parent
        self.written = 0.0
        self.began: tuple[int, int, float] | None = None  # epoch, iteration and time of the first iteration seen
        self.epoch_seconds: float | None = None

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        now, iterations = time.monotonic(), self.cell.config.iterations
        if self.began is None or self.began[0] != epoch:
            self.began = (epoch, iteration, now)
        elif iteration > self.began[1]:
            self.epoch_seconds = (now - self.began[2]) / (iteration - self.began[1]) * iterations
        self._note(share=iteration / iterations, now=f"{iteration}/{iterations}")

    def evaluating(self, split: str, done: int, total: int) -> None:
        self._note(share=1.0, now=f"{split} {done}/{total}")

    def epoch(self, metrics: dict[str, Any], seconds: float) -> None:
        self.written = 0.0
        self._note(share=0.0, now="")

    def close(self) -> None:
        """Take the note back, if there is one of ours."""
        if self.written:
            self.cell.note("progress.json").unlink(missing_ok=True)

    def _note(self, **progress: Any) -> None:
        if time.monotonic() - self.written < PAUSE:
            return
        self.written = time.monotonic()
        self.cell.write("progress.json", json.dumps({**progress, "epoch_seconds": self.epoch_seconds}))
        if self.parent is not None and os.getppid() != self.parent:
            os.kill(os.getpid(), signal.SIGTERM)
