"""Divergence: what happens when numbers are no longer finite, or a gate no longer decides anything.

A meta-step that is not finite is not taken (`meta_step`). After `LIMIT` of them in a row the run stops, with the state
before them as a checkpoint. A gate beyond `CLOSED` or `OPEN` is saturated: a finding, and the run continues.
docs/reliability.md has all the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradshare.errors import UserError
from gradshare.runs.records import Divergence, Epoch

if TYPE_CHECKING:
    from torch import Tensor

    from gradshare.learners.learner import Outcome

LIMIT = 20  # steps in a row: the tasks differ in each and the weights do not, so no single batch is to blame
CLOSED, OPEN = 0.01, 0.99
"""Where a gate counts as saturated. Beyond, 99 % of what it mixes comes from one side, and the sigmoid is so flat (a
25th of its steepest) that the outer loop can hardly turn back. The paper's pathological runs drift to high gates; it
names the limit 1, where the task's own gradient is masked out, but no bound before it: this one is ours."""


class Diverged(UserError):
    """A run stopped because its numbers are no longer finite."""


class Watch:
    """Which steps of an epoch were not taken, and why; kept on the device until somebody asks.

    A step's code is 0 if it was taken, else the number of its cause, from 1. A negative code is a step not taken for
    which the run was stopped already: it stays counted, but does not stop the resumed run again. Checkpoints hold the
    codes as `faults`: the last `LIMIT` steps before the epoch, then those of the epoch.
    """

    def __init__(self, log: Tensor, leaves: Iterable[str]) -> None:
        """`log` has the epoch's iterations as its last axis; `leaves` are the names of what the outer loop moves."""
        self.iterations = log.shape[-1]
        self.faults = log.new_zeros(LIMIT + self.iterations)
        self.causes = ["the outer loss", *(f"the gradient of {_words(leaf)}" for leaf in leaves)]

    def note(self, iteration: int, outcome: Outcome) -> None:
        assert outcome.fault is not None, "`meta_step` sets it"
        self.faults[LIMIT + iteration] = outcome.fault

    @property
    def skipped(self) -> int:
        """Steps of this epoch that were not taken."""
        return int((self.faults[LIMIT:] != 0).sum())

    def diverged(self, epoch: int, iteration: int) -> Divergence | None:
        """Why to stop after an iteration (both from 0): `LIMIT` steps in a row that were not taken."""
        until = LIMIT + iteration + 1
        if not (self.faults[until - LIMIT : until] > 0).all():
            return None
        codes = self.faults[:until].tolist()
        first = max((at + 1 for at, code in enumerate(codes) if code <= 0), default=0)
        since, at = divmod(epoch * self.iterations + first - LIMIT, self.iterations)
        return Divergence(since + 1, at + 1, self.causes[int(codes[first]) - 1], until - first)

    def mark_reported(self) -> None:
        """The run is stopped for the steps not taken so far: they no longer stop it when it is resumed."""
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


MEANINGS = {
    ("m", True): "the current batch overwrites the memory",
    ("m", False): "the memory takes in nothing new",
    ("lam", True): "almost nothing of a task's own gradient is left",
    ("lam", False): "a task uses its own gradient unchanged",
}


def saturated(line: Epoch) -> str:
    """The first gate that is practically constant after an epoch, and what that means; "" if there is none."""
    for gate, symbol, values in (("m", "σ(m)", line.m), ("lam", "σ(λ)", line.lam)):
        for step, value in enumerate(values or (), 1):
            if value <= CLOSED or value >= OPEN:
                return f"{symbol} of inner step {step} is {value:.3f}: {MEANINGS[gate, value >= OPEN]}"
    return ""
