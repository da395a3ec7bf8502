"""Evaluation: adapt to unseen tasks, each by itself, and score the predictions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradshare.engine.processes import ALONE, Group
from gradshare.errors import MOST_SEED, UserError, check_whole
from gradshare.learners.learner import Learner, check_learner, check_state, value_or_type
from gradshare.method.episodes import Episodes, Shape, TaskSource, draw, task_key, whole_shape
from gradshare.method.losses import accuracy
from gradshare.method.network import NormStatistics
from gradshare.method.state import MetaState
from gradshare.runs.config import Training

Predict = Callable[[MetaState, Episodes], Tensor]  # -> logits of the query sets, [tasks, n, ways]


class Evaluable(ABC):
    """A run that `evaluate` takes in place of a learner, a state and a data set."""

    @property
    @abstractmethod
    def best(self) -> MetaState:
        """The state after the best epoch by validation; without validation, after the last one."""

    @abstractmethod
    def parts(self, dataset: TaskSource | None = None) -> Parts:
        """What the run is evaluated with; `dataset`: on other data than its own."""


class Parts(NamedTuple):
    """What a run is evaluated with."""

    learner: Learner
    dataset: TaskSource
    training: Training  # has the shape, the seed, ...


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of every task."""

    losses: Tensor
    """Query loss of every task, [tasks]."""
    accuracies: Tensor | None
    """Accuracy of every task, [tasks]; None if the targets are not classes."""
    norm_statistics: NormStatistics = "batch"
    """Of batch norm: the query batch's (transductive), or the support set's (inductive)."""

    def __repr__(self) -> str:
        values = {"accuracy": self.accuracy, "loss": self.loss, "interval": self.interval}
        shown = "".join(f"{name}={value:.4g}, " for name, value in values.items() if value is not None)
        return f"Evaluation({shown}tasks={len(self.losses)}, norm_statistics={self.norm_statistics!r})"

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
        """The mean over tasks; None where targets are not classes."""
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
    learner: Learner | Evaluable,
    states: MetaState | Sequence[MetaState] | None = None,
    dataset: TaskSource | None = None,
    split: str = "test",
    shape: Shape | None = None,
    tasks: int = 600,
    seed: int | None = None,
    batch: int | None = None,
    between: Callable[[int], None] = lambda done: None,
    group: Group = ALONE,
    predict: Predict | None = None,
    *,
    steps: int | None = None,
    norm_statistics: NormStatistics | None = None,
) -> Evaluation:
    """Evaluate a run, or a learner with a state, on tasks of a split; several states by the mean of their logits.

    The states are not changed. The tasks depend on `seed`, `split`, `shape` and `batch` alone.

    Args:
        learner: a run, from `gs.train` or `gs.load_run`: what you leave out is as the run has it. Or a learner.
        states: one state, or several as an ensemble; a run's default is the state after its best epoch, `run.best`.
        dataset: where the tasks come from; a run's default is its own data.
        shape: ways, shots and queries of a task; a learner's default is `gs.Shape()`, 5-way 1-shot with 15 queries.
        tasks: how many.
        seed: which tasks; a learner's default is 0.
        batch: tasks evaluated at a time; a learner's default is 25.
        between: called after each batch with the number of tasks done so far.
        group: processes that share the batches; each of them gets the results of all, as one process alone would.
        predict: used instead of `learner.logits`; a `GraphedPrediction` does the same in less time.
        steps: inner steps; None is as in training. Values learned for each step stay at their last one past it.
        norm_statistics: `"batch"`: batch norm uses the statistics of the query batch (transductive); `"support"`:
            those of the support set (inductive). A learner's default is `"batch"`.

    Example:
        >>> import gradshare as gs, tempfile
        >>> learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1)
        >>> run = gs.train(learner, gs.load_dataset("glyphs"), tempfile.mkdtemp() + "/run", display=False, shots=2,
        ...                epochs=1, iterations=2, val_tasks=4, test_tasks=4)
        >>> len(gs.evaluate(run, tasks=10).losses)  # 2-shot, the best epoch
        10
        >>> more = gs.evaluate(run, shape=gs.Shape(ways=5, shots=10, queries=5), tasks=10, steps=3)
    """
    training = Training()
    if isinstance(learner, Evaluable):
        run, given = learner, states
        learner, dataset, training = run.parts(dataset)
        here = next(learner.module.parameters()).device
        states = [state.to(here) for state in all_states(run.best if given is None else given)]
    elif states is None or dataset is None:
        check_learner(learner)
        raise UserError("evaluate takes a run, gs.evaluate(run), or gs.evaluate(learner, state, dataset)")
    check_learner_and_source(learner, dataset)
    ensemble = all_states(states)
    shape = Shape(training.ways, training.shots, training.queries) if shape is None else whole_shape(shape)
    seed = training.seed if seed is None else seed
    batch = training.eval_batch if batch is None else batch
    norm_statistics = training.norm_statistics if norm_statistics is None else norm_statistics
    check_whole("tasks", tasks, 1)
    check_whole("batch", batch, 1)
    check_whole("seed", seed, 0, MOST_SEED)
    predict = predict or partial(learner.logits, steps=steps, norm_statistics=norm_statistics)
    device = next(iter(ensemble[0].params.values())).device
    parts: dict[int, Evaluation] = {}  # by the number of the batch
    batches = math.ceil(tasks / batch)
    for first in range(0, batches, group.size):
        number = first + group.rank
        if number < batches:
            key = task_key(seed, split, iteration=number)
            episodes = draw(dataset, split, shape, min(batch, tasks - number * batch), key).to(device)
            logits = torch.stack([predict(state, episodes) for state in ensemble]).mean(0)
            scored = logits, episodes.query_y, episodes.query_mask
            parts[number] = Evaluation(learner.losses(*scored), accuracy(*scored), norm_statistics)
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
    return Evaluation(torch.cat(losses), torch.cat(accuracies) if accuracies else None, parts[0].norm_statistics)


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
