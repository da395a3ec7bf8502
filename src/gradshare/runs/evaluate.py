"""Evaluation: adapt to unseen tasks, each by itself, and score the predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradshare.engine.processes import ALONE, Group
from gradshare.errors import MOST_SEED, UserError, check_whole, short_repr
from gradshare.learners.learner import Learner, check_learner, check_state, value_or_type
from gradshare.method.episodes import Episodes, Shape, TaskSource, task_key
from gradshare.method.losses import accuracy
from gradshare.method.state import MetaState

Predict = Callable[[MetaState, Episodes], Tensor]  # -> logits of the query sets, [tasks, n, ways]


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of every task."""

    losses: Tensor  # [tasks]
    accuracies: Tensor | None  # [tasks]; None if the targets are not classes

    @property
    def diverged(self) -> int:
        """Tasks whose loss is not finite."""
        return len(self.losses) - len(_finite(self.losses))

    @property
    def loss(self) -> float | None:
        """The mean over the tasks that did not diverge; None if all did."""
        return finite_mean(self.losses)

    @property
    def accuracy(self) -> float | None:
        return None if self.accuracies is None else self.accuracies.mean().item()

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % interval over tasks: of the accuracy, or of the loss if there is no accuracy.

        None for fewer than two tasks.
        """
        scores = _finite(self.losses) if self.accuracies is None else self.accuracies
        return 1.96 * scores.std().item() / math.sqrt(len(scores)) if len(scores) > 1 else None


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
    group: Group = ALONE,
    predict: Predict | None = None,
) -> Evaluation:
    """Evaluate a state on tasks of a split; or several states, by the mean of their logits.

    The states are not changed. The tasks depend on `seed`, `split` and `batch` alone.

    Args:
        shape: ways, shots and queries of a task.
        batch: tasks evaluated at a time.
        between: called after each batch with the number of tasks done so far.
        group: processes that share the batches; each of them gets the results of all, as one process alone would.
        predict: used instead of `learner.logits`; a `GraphedPrediction` does the same in less time.
    """
    check_learner_and_source(learner, dataset)
    ensemble, shape = all_states(states), whole_shape(shape)
    check_whole("tasks", tasks, 1)
    check_whole("batch", batch, 1)
    check_whole("seed", seed, 0, MOST_SEED)
    predict = predict or learner.logits
    device = next(iter(ensemble[0].params.values())).device
    parts: dict[int, Evaluation] = {}  # by the number of the batch
    batches = math.ceil(tasks / batch)
    for first in range(0, batches, group.size):
        number = first + group.rank
        if number < batches:
            key = task_key(seed, split, iteration=number)
            episodes = draw(dataset, split, shape, min(batch, tasks - number * batch), key).to(device)
            logits = torch.stack([predict(state, episodes) for state in ensemble]).mean(0)
            parts[number] = Evaluation(learner.losses(logits, episodes.query_y), accuracy(logits, episodes.query_y))
        between(min(tasks, (first + group.size) * batch))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # so that a timing of this call covers all of it
    found = {number: part for own in group.gather(parts) for number, part in own.items()}
    return _join([found[number] for number in sorted(found)], device)


def finite_mean(values: Tensor) -> float | None:
    """The mean of the finite values; None if there are none."""
    finite = _finite(values)
    return finite.mean().item() if len(finite) else None


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()].double()  # in float32 the sum of large losses overflows


def _join(parts: list[Evaluation], device: torch.device) -> Evaluation:
    losses = [part.losses.to(device) for part in parts]
    accuracies = [part.accuracies.to(device) for part in parts if part.accuracies is not None]
    return Evaluation(torch.cat(losses), torch.cat(accuracies) if accuracies else None)


def check_learner_and_source(learner: Any, dataset: Any) -> None:
    check_learner(learner)
    if not callable(getattr(dataset, "sample", None)):
        found = value_or_type(dataset)
        raise UserError(f"a data set is what gs.load_dataset(name) opens, or has a method sample, not {found}")


def all_states(states: MetaState | Iterable[MetaState]) -> list[MetaState]:
    """One state, or an ensemble of them, as a list."""
    if isinstance(states, Iterable):
        ensemble = list(states)
        if not ensemble:
            raise UserError("there is no state to evaluate: the list is empty")
    else:
        ensemble = [states]
    for state in ensemble:
        check_state(state)
    return ensemble


def whole_shape(shape: Any) -> Shape:
    """Ways, shots and queries, as a `Shape` or a plain tuple has them."""
    if not isinstance(shape, tuple | list) or len(shape) != len(Shape._fields):
        raise UserError(f"a shape is (ways, shots, queries), such as gs.Shape(5, 1, 15), not {short_repr(shape)}")
    for name, value in zip(Shape._fields, shape, strict=True):
        check_whole(name, value, 1)
    return Shape(*shape)


def draw(dataset: TaskSource, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
    """Draw tasks from a source, and check what it returns."""
    episodes = dataset.sample(split, shape, tasks, key)
    if not isinstance(episodes, Episodes):
        raise UserError(f"the data set's sample returns gs.Episodes, not {value_or_type(episodes)}")
    if episodes.tasks != tasks:
        found = f"{episodes.tasks}, not {tasks}"
        raise UserError(f"the data set's sample returned another number of {split} tasks than asked for: {found}")
    return episodes
