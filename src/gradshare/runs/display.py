"""What a run shows while it trains. The displays of the command line are in `gradshare.experiments.display`."""

from __future__ import annotations

from typing import Protocol

from gradshare.runs.records import Epoch


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
