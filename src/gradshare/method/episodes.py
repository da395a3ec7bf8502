"""Episodes: the tasks of a batch. Which tasks are drawn depends on seed, split, epoch and iteration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method import SPLITS


@dataclass(frozen=True)
class Episodes:
    """A batch of tasks: support examples to adapt to, and query examples to evaluate on.

    Example:
        >>> import torch
        >>> Episodes(torch.rand(2, 5, 1, 28, 28), torch.arange(5).expand(2, 5),
        ...          torch.rand(2, 75, 1, 28, 28), torch.arange(5).repeat(15).expand(2, 75)).tasks
        2
    """

    support_x: Tensor  # [tasks, ways*shots, ...]
    support_y: Tensor  # [tasks, ways*shots]
    query_x: Tensor  # [tasks, ways*queries, ...]
    query_y: Tensor  # [tasks, ways*queries]

    def __post_init__(self) -> None:
        for part in ("support", "query"):
            check_examples(getattr(self, part + "_x"), getattr(self, part + "_y"), part)
        if len(self.support_x) != len(self.query_x):
            raise UserError(f"support has {len(self.support_x)} tasks and query {len(self.query_x)}")
        if self.support_y.numel() == 0 or self.query_y.numel() == 0:
            raise UserError("a batch needs at least one task, with at least one support and one query example")

    @property
    def tasks(self) -> int:
        return len(self.support_x)

    def to(self, *args: Any, **kwargs: Any) -> Episodes:
        """Move or convert the inputs; targets follow the device, and floating ones the type."""
        x = self.support_x.to(*args, **kwargs)
        dtype = x.dtype if x.is_floating_point() else None  # tokens or bytes say nothing about targets
        moved = [self.support_y, self.query_x, self.query_y]
        moved = [part.to(x.device, dtype if part.is_floating_point() else None) for part in moved]
        return Episodes(x, *moved)

    def __getitem__(self, tasks: slice) -> Episodes:
        return Episodes(self.support_x[tasks], self.support_y[tasks], self.query_x[tasks], self.query_y[tasks])


def check_examples(x: object, y: object, part: str) -> None:
    """Raise an error where inputs and targets do not belong together."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise UserError(f"{part}_x and {part}_y are tensors, not {type(x).__name__} and {type(y).__name__}")
    if x.dim() < 2 or y.dim() < 2 or x.shape[:2] != y.shape[:2]:
        raise UserError(f"{part}_x and {part}_y start with [tasks, examples], not {list(x.shape)} and {list(y.shape)}")


class Shape(NamedTuple):
    """How many classes, support and query examples of each a task has."""

    ways: int = 5
    shots: int = 1
    queries: int = 15


class TaskSource(Protocol):
    """Where `gs.train` and `gs.evaluate` get tasks from: a `Dataset`, or a class of your own."""

    def sample(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
        """Draw `tasks` tasks of a split; the same arguments give the same tasks."""
        ...


def draw(source: TaskSource, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
    """Draw tasks from a source, and check what it returns."""
    episodes = source.sample(split, shape, tasks, key)
    if not isinstance(episodes, Episodes):
        raise UserError(f"the data set's sample returns gs.Episodes, not {type(episodes).__name__}")
    if episodes.tasks != tasks:
        found = f"{episodes.tasks}, not {tasks}"
        raise UserError(f"the data set's sample returned another number of {split} tasks than asked for: {found}")
    return episodes


def task_key(seed: int, split: str, epoch: int = 0, iteration: int = 0) -> tuple[int, ...]:
    """The key of a batch of tasks. Two methods with one seed see the same tasks."""
    if split not in SPLITS:
        raise UserError(f"a split is one of {', '.join(SPLITS)}, not '{split}'")
    return (seed, SPLITS.index(split), epoch, iteration)


LARGE = 10_000  # images of a class above which no random number is drawn for each of them


def choose(
    counts: NDArray[np.int64],  # [classes]: images of each class
    shape: Shape,
    tasks: int,
    key: tuple[int, ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # [tasks, ways], [tasks, ways, shots + queries]
    """Choose classes, and images within each, uniformly and without replacement."""
    generator = np.random.default_rng(key)
    classes, examples = _smallest(generator.random((tasks, len(counts))), shape.ways), shape.shots + shape.queries
    if counts.max() > LARGE:
        own = [generator.choice(counts[each], examples, replace=False) for each in classes.ravel()]
        return classes, np.stack(own).reshape(*classes.shape, examples)
    order = generator.random((tasks, shape.ways, counts.max()))
    order[np.arange(counts.max()) >= counts[classes][..., None]] = 2.0  # after every image that exists
    return classes, _smallest(order, examples)


def _smallest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Places of the `count` smallest values, in order: the beginning of `values.argsort(-1)`."""
    if count >= values.shape[-1] or values.shape[-1] < 256:  # a short sort takes less time than what follows
        return values.argsort(-1)[..., :count]
    places = values.argpartition(count - 1, -1)[..., :count]
    return np.take_along_axis(places, np.take_along_axis(values, places, -1).argsort(-1), -1)


def episodes_from(
    images: Tensor,  # [tasks, ways, shots + queries, ...]
    shape: Shape,
) -> Episodes:
    """Arrange chosen images as support and query sets; an image's label is the place of its class among the ways."""
    tasks = len(images)
    labels = torch.arange(shape.ways, device=images.device).view(1, shape.ways, 1)

    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1, 2), labels.expand(tasks, shape.ways, x.shape[2]).flatten(1, 2)

    return Episodes(*part(images[:, :, : shape.shots]), *part(images[:, :, shape.shots :]))
