"""What a run shows while it goes on: a live table of bars on a terminal, one plain line an epoch otherwise."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self

from gradshare.runs.config import Training
from gradshare.runs.divergence import saturated


class Display(Protocol):
    """What a run tells while it goes on."""

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None: ...
    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def epoch(self, metrics: dict[str, Any], seconds: float) -> None: ...


class Silent:
    """A display that shows nothing."""

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None: ...
    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def epoch(self, metrics: dict[str, Any], seconds: float) -> None: ...


class Screen(Protocol):
    """Shows the progress of one or several runs, told apart by name."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def iteration(self, run: str, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None: ...
    def evaluating(self, run: str, split: str, done: int, total: int) -> None: ...
    def epoch(self, run: str, metrics: dict[str, Any], seconds: float) -> None: ...


class RunDisplay:
    """One run's part of a screen; what `train` takes as `display`."""

    def __init__(self, screen: Any, run: str) -> None:
        self.screen, self.run = screen, run

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        self.screen.iteration(self.run, epoch, iteration, loss, accuracy)

    def evaluating(self, split: str, done: int, total: int) -> None:
        self.screen.evaluating(self.run, split, done, total)

    def epoch(self, metrics: dict[str, Any], seconds: float) -> None:
        self.screen.epoch(self.run, metrics, seconds)


def summary_of(metrics: dict[str, Any]) -> str:
    """An epoch in words: validation with its interval, and the mean gates."""
    if metrics["val_accuracy"] is None:
        spread = "" if metrics["val_interval"] is None else f"±{metrics['val_interval']:.2g}"
        text = "no finite val loss" if metrics["val_loss"] is None else f"val loss {metrics['val_loss']:.4g}{spread}"
    else:
        text = f"val {metrics['val_accuracy']:.1%} ±{metrics['val_interval']:.1%}"
    for name, symbol in (("m", "σ(m)"), ("lam", "σ(λ)")):
        if metrics[name] is not None:
            text += f" {symbol} {sum(metrics[name]) / len(metrics[name]):.2f}"
    if metrics.get("skipped"):
        text += f" skipped {metrics['skipped']}"
    return text


class _Warnings:
    """Tells of a run's first saturated gate, once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def of(self, run: str, metrics: dict[str, Any]) -> str | None:
        found = saturated(metrics)
        if not found or run in self._told:
            return None
        self._told.add(run)
        return f"{run}: saturated after epoch {metrics['epoch']}: {found[0]}"


class PlainScreen:
    """One line an epoch, for files and pipes."""

    def __init__(self, training: Training) -> None:
        self.training, self.warnings = training, _Warnings()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def iteration(self, run: str, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None: ...
    def evaluating(self, run: str, split: str, done: int, total: int) -> None: ...

    def epoch(self, run: str, metrics: dict[str, Any], seconds: float) -> None:
        place = f"epoch {metrics['epoch']}/{self.training.epochs}"
        print(f"{run:<11}  {place}  {summary_of(metrics)}  {seconds:.1f} s", flush=True)
        if warning := self.warnings.of(run, metrics):
            print(warning, flush=True)


class LiveScreen:
    """A bar for each run with accuracy, gates and the time left."""

    def __init__(self, training: Training) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.training, self.warnings = training, _Warnings()
        self._rows: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.fields[run]}"),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TextColumn("{task.fields[last]}"),
            TimeRemainingColumn(),
        )

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def _row(self, run: str) -> Any:
        if run not in self._rows:
            total = self.training.epochs * self.training.iterations
            self._rows[run] = self._progress.add_task("", total=total, run=run, now="", last="")
        return self._rows[run]

    def iteration(self, run: str, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        now = f"loss {loss:.2f}" if accuracy is None else f"train {accuracy:.0%}"
        self._progress.update(self._row(run), completed=epoch * self.training.iterations + iteration, now=now)

    def evaluating(self, run: str, split: str, done: int, total: int) -> None:
        self._progress.update(self._row(run), now=f"{split} {done}/{total}")

    def epoch(self, run: str, metrics: dict[str, Any], seconds: float) -> None:
        done = metrics["epoch"] * self.training.iterations
        self._progress.update(self._row(run), completed=done, last=summary_of(metrics))
        if warning := self.warnings.of(run, metrics):
            self._progress.console.print(warning, markup=False, highlight=False)


def screen(training: Training) -> Screen:
    """The screen that fits where the output goes."""
    return LiveScreen(training) if sys.stdout.isatty() else PlainScreen(training)
