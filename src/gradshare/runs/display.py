"""What a run shows while it trains: a live bar on a terminal, otherwise one plain line an epoch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from gradshare.runs.config import Training
from gradshare.runs.divergence import saturated
from gradshare.runs.records import Epoch

if TYPE_CHECKING:
    from rich.progress import Progress


class Display(Protocol):
    """What `train` calls while it runs."""

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        """After a meta-iteration; `epoch` counts the epochs before it, `iteration` those of this epoch so far."""

    def evaluating(self, split: str, done: int, total: int) -> None:
        """After a batch of validation or test tasks."""

    def epoch(self, line: Epoch, seconds: float) -> None:
        """After an epoch with its validation; `line` is what metrics.jsonl gets."""


class Silent:
    """A display that shows nothing."""

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None: ...
    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def epoch(self, line: Epoch, seconds: float) -> None: ...


def epoch_text(line: Epoch) -> str:
    """An epoch in words: validation with its interval, and the mean gates.

    Example:
        >>> epoch_text(Epoch(1, val_accuracy=0.5, val_interval=0.01, lam=(0.25, 0.75), skipped=2))
        'val 50.0% ±1.0% σ(λ) 0.50 skipped 2'
    """
    if line.val_accuracy is not None:
        parts = [f"val {line.val_accuracy:.1%} ±{line.val_interval or 0:.1%}"]
    elif line.val_loss is not None:
        parts = [f"val loss {line.val_loss:.4g}" + ("" if line.val_interval is None else f"±{line.val_interval:.2g}")]
    else:
        parts = ["no finite val loss"]
    parts += [f"{s} {sum(gates) / len(gates):.2f}" for s, gates in (("σ(m)", line.m), ("σ(λ)", line.lam)) if gates]
    return " ".join(parts + ([f"skipped {line.skipped}"] if line.skipped else []))


class Plain(Silent):
    """One line an epoch, for files and pipes."""

    def __init__(self, training: Training, name: str) -> None:
        self.training, self.name, self._warned = training, name, False

    def epoch(self, line: Epoch, seconds: float) -> None:
        place = f"epoch {line.epoch}/{self.training.epochs}"
        self._print(f"{self.name:<11}  {place}  {epoch_text(line)}  {seconds:.1f} s")
        self._warn(line)

    def _warn(self, line: Epoch) -> None:
        """Report the first saturated gate of the run, once."""
        found = saturated(line)
        if found and not self._warned:
            self._warned = True
            self._print(f"{self.name}: saturated after epoch {line.epoch}: {found[0]}")

    def _print(self, text: str) -> None:
        print(text, flush=True)


class Live(Plain):
    """A bar with accuracy, gates and the time left."""

    def __init__(self, training: Training, name: str, progress: Progress) -> None:
        super().__init__(training, name)
        self.progress = progress
        total = training.epochs * training.iterations
        self.row = progress.add_task("", total=total, run=name, now="", last="")

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        now = f"loss {loss:.2f}" if accuracy is None else f"train {accuracy:.0%}"
        self.progress.update(self.row, completed=epoch * self.training.iterations + iteration, now=now)

    def evaluating(self, split: str, done: int, total: int) -> None:
        self.progress.update(self.row, now=f"{split} {done}/{total}")

    def epoch(self, line: Epoch, seconds: float) -> None:
        self.progress.update(self.row, completed=line.epoch * self.training.iterations, last=epoch_text(line))
        self._warn(line)

    def _print(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)


@contextmanager
def terminal(training: Training, name: str) -> Iterator[Display]:
    """The display that fits where the output goes, for one run."""
    if not sys.stdout.isatty():
        yield Plain(training, name)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    texts = (TextColumn("{task.fields[now]}"), TextColumn("{task.fields[last]}"))
    columns = (TextColumn("{task.fields[run]}"), BarColumn(bar_width=8), MofNCompleteColumn(), *texts)
    with Progress(*columns, TimeRemainingColumn()) as progress:
        yield Live(training, name, progress)
