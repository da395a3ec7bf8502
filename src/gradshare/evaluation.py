"""Evaluation: adapt to unseen tasks, each for itself, and judge the predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradshare.episodes import Shape, TaskSource, task_key
from gradshare.learner import Learner, MetaState, accuracy


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of every task."""

    losses: Tensor  # [tasks]
    accuracies: Tensor | None  # [tasks]; None where targets are not classes

    @property
    def loss(self) -> float:
        return self.losses.mean().item()

    @property
    def accuracy(self) -> float | None:
        return None if self.accuracies is None else self.accuracies.mean().item()

    @property
    def interval(self) -> float:
        """Half the width of the 95 % interval over tasks, of the accuracy, or of the loss where there is none."""
        scores = self.losses if self.accuracies is None else self.accuracies
        return 1.96 * scores.std().item() / math.sqrt(len(scores)) if len(scores) > 1 else math.inf


@torch.no_grad()
def evaluate(
    learner: Learner,
    states: MetaState | Sequence[MetaState],
    dataset: TaskSource,
    split: str = "test",
    shape: Shape = Shape(),
    tasks: int = 600,
    seed: int = 0,
    batch: int = 25,
    between: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Judge a state, or an ensemble of states by the mean of their logits, on tasks of a split.

    The states are not changed. The tasks depend on `seed` and `split` alone.

    Args:
        between: called with the number of tasks done after each batch.
    """
    ensemble = [states] if isinstance(states, MetaState) else list(states)
    device = next(iter(ensemble[0].params.values())).device
    parts: list[Evaluation] = []
    for number, start in enumerate(range(0, tasks, batch)):
        key = task_key(seed, split, iteration=number)
        episodes = dataset.sample(split, shape, min(batch, tasks - start), key).to(device)
        fast = [learner.adapt(state, episodes.support_x, episodes.support_y) for state in ensemble]
        logits = torch.stack([learner.predict(weights, episodes.query_x) for weights in fast]).mean(0)
        parts.append(Evaluation(learner.losses(logits, episodes.query_y), accuracy(logits, episodes.query_y)))
        between(start + episodes.tasks)
    return _joined(parts)


def _joined(parts: list[Evaluation]) -> Evaluation:
    accuracies = [part.accuracies for part in parts if part.accuracies is not None]
    return Evaluation(torch.cat([part.losses for part in parts]), torch.cat(accuracies) if accuracies else None)
