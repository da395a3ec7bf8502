"""What the files of a run hold, as typed values. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["waiting", "running", "stopped", "failed", "diverged", "done"]
"""How far a run is. The files of a run never say "failed": whoever starts runs in other processes notes that."""
ENSEMBLE = 5  # the best epochs whose checkpoints are kept; together they are the ensemble of the test


@dataclass(frozen=True)
class Epoch:
    """A line of metrics.jsonl.

    Accuracies are None for regression; losses are None if no task has a finite one; of a run without validation,
    everything of it is None.
    """

    epoch: int  # from 1
    train_loss: float | None = None
    train_accuracy: float | None = None
    skipped: int = 0  # meta-steps not taken, because something was not finite
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_interval: float | None = None  # half the 95 % interval over tasks: of the accuracy, or else of the loss
    val_diverged: int = 0  # validation tasks without a finite loss
    m: tuple[float, ...] | None = None  # the gates of every inner step, after the sigmoid; None: the arm has none
    lam: tuple[float, ...] | None = None
    agreement: tuple[float, ...] | None = None  # of conditioned sharing

    def __getitem__(self, name: str) -> Any:
        """`line["val_accuracy"]`: displays of users got a dict before version 0.2."""
        return vars(self)[name]

    @property
    def validated(self) -> bool:
        """Whether there was a validation."""
        return self.val_accuracy is not None or self.val_loss is not None or self.val_diverged > 0

    def as_json(self) -> dict[str, Any]:
        """The line as a JSON object, with lists."""
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        if self.agreement is None:
            del found["agreement"]
        return found if self.validated else {name: one for name, one in found.items() if not name.startswith("val_")}


@dataclass(frozen=True)
class Timing:
    """A line of timings.jsonl."""

    epoch: int
    train_seconds: float
    val_seconds: float


@dataclass(frozen=True)
class Progress:
    """How far a run is at a checkpoint, and everything that its other files are made from."""

    epoch: int = 0  # epochs finished
    iteration: int = 0  # iterations finished in the epoch after that
    seconds: float = 0.0  # spent in that epoch so far
    metrics: tuple[Epoch, ...] = ()
    timings: tuple[Timing, ...] = ()
    run: str = ""  # which run it belongs to, by `config.identity`; "": not known

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return f"epoch-{self.epoch:04d}-iteration-{self.iteration:04d}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": [line.as_json() for line in self.metrics]}


@dataclass(frozen=True)
class Score:
    """The mean over the test tasks."""

    accuracy: float | None  # None for regression
    interval: float | None  # half the 95 % interval over tasks: of the accuracy, or else of the loss
    loss: float | None
    diverged: int = 0  # tasks without a finite loss
    epochs: tuple[int, ...] = ()  # one, or those of the ensemble


@dataclass(frozen=True)
class Test:
    """The best epoch alone, and the ensemble of the best epochs, on the test tasks."""

    tasks: int
    best: Score
    ensemble: Score
    __test__ = False  # pytest would take the class for a test


@dataclass(frozen=True)
class Summary:
    """summary.json of a finished run."""

    best_epoch: int
    best_val_accuracy: float | None = None
    best_val_loss: float | None = None  # for regression
    test: Test | None = None
    ended: str | None = None  # why before its last epoch; None if it trained all

    def as_json(self) -> dict[str, Any]:
        """As the file has it: the best validation by the measure of the run; `epoch` of one, `epochs` of several."""
        measure = "best_val_loss" if self.best_val_accuracy is None else "best_val_accuracy"
        found: dict[str, Any] = {"best_epoch": self.best_epoch, measure: getattr(self, measure), "test": None}
        if self.test is not None:
            best, ensemble = ({**asdict(score)} for score in (self.test.best, self.test.ensemble))
            (epoch,), epochs = best.pop("epochs"), list(ensemble.pop("epochs"))
            scores = {"best": {"epoch": epoch, **best}, "ensemble": {"epochs": epochs, **ensemble}}
            found["test"] = {"tasks": self.test.tasks, **scores}
        return found if self.ended is None else {**found, "ended": self.ended}


@dataclass(frozen=True)
class Divergence:
    """diverged.json: why a run was stopped."""

    epoch: int  # of the first step that was not taken, from 1
    iteration: int
    cause: str  # what was not finite in it
    steps: int  # not taken, in a row
    checkpoint: str = ""  # the state after the last step that was taken, relative to the run folder

    def __str__(self) -> str:
        since = f", and {self.steps - 1} more steps in a row could not be taken" if self.steps > 1 else ""
        return f"{self.cause} was not finite in epoch {self.epoch}, iteration {self.iteration}{since}"


def best_epochs(epochs: Sequence[Epoch], count: int = ENSEMBLE) -> list[int]:
    """The epochs with the best validation, best first; of two equal ones the earlier first.

    By accuracy; for regression by loss, with epochs in which fewer tasks diverged before all others. Without validation
    the later first.
    """

    def rank(line: Epoch) -> tuple[float, float]:
        if line.val_accuracy is not None:
            return 0, -line.val_accuracy
        return line.val_diverged, math.inf if line.val_loss is None else line.val_loss

    if not any(line.validated for line in epochs):
        return [line.epoch for line in reversed(epochs)][:count]
    return [line.epoch for line in sorted(epochs, key=rank)[:count]]


def out_of_patience(epochs: Sequence[Epoch], patience: int) -> bool:
    """Whether validation has not improved for so many epochs; never for a patience of 0."""
    return bool(patience and epochs) and len(epochs) - best_epochs(epochs, 1)[0] >= patience
