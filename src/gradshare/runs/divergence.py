"""Divergence: what happens where numbers are no longer finite, or a gate has nothing left to decide.

- A task's gradient counts in what tasks share where it is finite (`sharing.finite_part`): the memory stays finite.
- A meta-step whose outer loss, or a gradient of it, is not finite is not taken (`outer.meta_step`): weights, learned
  values, Adam and the memory stay as they were. `metrics.jsonl` counts such steps of an epoch as `skipped`.
- After `LIMIT` of them in a row the run is stopped. The weights are those after the last step that was taken; they are
  saved as a checkpoint, and `diverged.json` says when it began and what was not finite. Such a run is not taken up
  again while that file is there.
- In validation and test the predictions of a task that diverges count as they are; the loss is the mean over tasks with
  a finite one, and `val_diverged` counts the others.
- A gate beyond `CLOSED` or `OPEN` after an epoch is saturated: a finding, told once and marked in reports. The run goes
  on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradshare.errors import UserError
from gradshare.files import parse_json, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from gradshare.learners.learner import Outcome

LIMIT = 20  # steps in a row: the tasks differ in each and the weights do not, so no single batch is to blame
CLOSED, OPEN = 0.01, 0.99
"""Where a gate counts as saturated. Beyond, 99 % of what it mixes comes from one side, and the sigmoid is so flat (a
25th of its steepest) that the outer loop can hardly turn back. The paper's pathological runs drift to high gates; it
names the limit 1, where the task's own gradient is masked out, but no bound before it: this one is ours."""
NOTE = "diverged.json"


class Diverged(UserError):
    """A run stopped because its numbers are no longer finite."""


@dataclass(frozen=True)
class Divergence:
    """Why a run was stopped: what `diverged.json` holds."""

    epoch: int  # of the first step that was not taken, from 1
    iteration: int
    cause: str  # what was not finite in it
    steps: int  # not taken, in a row
    checkpoint: str = ""  # the state after the last step that was taken, in the run folder

    def __str__(self) -> str:
        since = f", and {self.steps - 1} more steps in a row could not be taken" if self.steps > 1 else ""
        return f"{self.cause} was not finite in epoch {self.epoch}, iteration {self.iteration}{since}"

    def saved(self, checkpoint: str) -> Self:
        return replace(self, checkpoint=checkpoint)

    def text(self) -> str:
        """What the file holds."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def read_note(folder: Path) -> Divergence | None:
    """Why the run in a folder was stopped; None where it did not diverge."""
    path = folder / NOTE
    try:
        note = Divergence(**parse_json(read_text(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged, or of another version of gradshare: {error}") from None
    if not isinstance(note.epoch, int) or not isinstance(note.steps, int):
        raise UserError(f"{path} is damaged: epoch and steps must be whole numbers")
    return note


def refuse(folder: Path) -> None:
    """Raise `Diverged` for the folder of a run that diverged: taken up again, it would do so again."""
    if (note := read_note(folder)) is not None:
        raise Diverged(
            f"the run in {folder} diverged: {note}; train with a lower rate in another folder, or, to go on with it"
            f" all the same, from {note.checkpoint}, delete {folder / NOTE}"
        )


class Watch:
    """Which steps of an epoch were not taken, and why, kept on the device until somebody asks."""

    def __init__(self, log: Tensor, leaves: Iterable[str]) -> None:
        """`log` has the epoch's iterations as its last axis; `leaves` are the names of what the outer loop moves."""
        self.iterations = log.shape[-1]
        self.faults = log.new_zeros(LIMIT + self.iterations)  # first those of the steps before the epoch
        self.causes = ["the outer loss", *(f"the gradient of {_words(leaf)}" for leaf in leaves)]

    def note(self, iteration: int, outcome: Outcome) -> None:
        assert outcome.fault is not None, "of `meta_step`"
        self.faults[LIMIT + iteration] = outcome.fault

    @property
    def skipped(self) -> int:
        """Steps of this epoch that were not taken."""
        return int((self.faults[LIMIT:] != 0).sum())

    def diverged(self, epoch: int, iteration: int) -> Divergence | None:
        """What to stop for after an iteration (both from 0): `LIMIT` steps in a row that were not taken."""
        if not (self.faults[iteration + 1 : LIMIT + iteration + 1] > 0).all():
            return None
        row = self.faults[: LIMIT + iteration + 1].tolist()
        begun = max((at + 1 for at, fault in enumerate(row) if fault <= 0), default=0)
        since, at = divmod(epoch * self.iterations + begun - LIMIT, self.iterations)
        return Divergence(since + 1, at + 1, self.causes[int(row[begun]) - 1], len(row) - begun)

    def settle(self) -> None:
        """The steps not taken so far stay counted, and no longer stop the run: who takes it up again knows of them."""
        self.faults.copy_(-self.faults.abs())

    def next_epoch(self) -> None:
        last = self.faults[-LIMIT:].clone()
        self.faults.zero_()
        self.faults[:LIMIT] = last


def _words(leaf: str) -> str:
    """What the outer loop moves, by its name in `MetaState.trainable`."""
    kinds = {
        "params/": "the weights ",
        "learned/per_step/": "the weights of each step ",
        "learned/rates/": "the rates of ",
    }
    for start, kind in kinds.items():
        if leaf.startswith(start):
            return kind + leaf.removeprefix(start)
    return leaf.removeprefix("learned/sharing/")


class Saturated(NamedTuple):
    """A gate of an inner step that is as good as constant."""

    gate: str  # m or lam
    step: int  # from 1
    value: float

    def __str__(self) -> str:
        symbol = {"m": "σ(m)", "lam": "σ(λ)"}[self.gate]
        return f"{symbol} of inner step {self.step} is {self.value:.3f}: {MEANINGS[self.gate, self.value >= OPEN]}"


MEANINGS = {
    ("m", True): "the batch at hand overwrites the memory",
    ("m", False): "the memory takes in nothing new",
    ("lam", True): "next to nothing of a task's own gradient is left",
    ("lam", False): "a task takes its own gradient as it is",
}


def saturated(metrics: Mapping[str, Any]) -> list[Saturated]:
    """The gates that are saturated after an epoch, from its line of `metrics.jsonl`."""
    return [
        Saturated(gate, step, value)
        for gate in ("m", "lam")
        for step, value in enumerate(metrics.get(gate) or (), 1)
        if value <= CLOSED or value >= OPEN
    ]
