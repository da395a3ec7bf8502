"""Episodes: the tasks of a batch. Which tasks are drawn depends on seed, split, epoch and iteration alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradshare.errors import UserError, check_whole, short_repr
from gradshare.method import SPLITS

Inputs = (
    Tensor | tuple[Tensor, ...] | dict[str, Tensor]
)  # what a model takes; the task axis comes first in every tensor
IGNORED = -100  # the label that PyTorch's cross entropy leaves out without a word


@dataclass(frozen=True)
class Episodes:
    """A batch of tasks: support examples to adapt to, and query examples to evaluate on.

    Args:
        support_x, query_x: inputs, `[tasks, examples, ...]`; or a tuple or dict of tensors, for a model with several
            inputs. There only the axis of tasks is fixed, so that edges, lengths and so on may be among them. A tuple
            goes to the model as its positional arguments and a dict by name, where `forward` takes them so; else it
            goes in whole, as one argument.
        support_y, query_y: targets, `[tasks, examples]` or `[tasks, examples, ...]`.
        support_mask, query_mask: True for a real example and False for padding, `[tasks, examples]`, for tasks with
            unequal numbers of examples. None: all are real. What stands in the padding does not matter.

    Example:
        >>> import torch
        >>> Episodes(torch.rand(2, 5, 1, 28, 28), torch.arange(5).expand(2, 5),
        ...          torch.rand(2, 75, 1, 28, 28), torch.arange(5).repeat(15).expand(2, 75)).tasks
        2
    """

    support_x: Inputs  # [tasks, ways*shots, ...]
    support_y: Tensor  # [tasks, ways*shots]
    query_x: Inputs  # [tasks, ways*queries, ...]
    query_y: Tensor  # [tasks, ways*queries]
    support_mask: Tensor | None = None  # [tasks, ways*shots]
    query_mask: Tensor | None = None  # [tasks, ways*queries]

    def __post_init__(self) -> None:
        check_examples(self.support_x, self.support_y, "support", self.support_mask)
        check_examples(self.query_x, self.query_y, "query", self.query_mask)
        if len(self.support_y) != len(self.query_y):
            raise UserError(f"support has {len(self.support_y)} tasks and query {len(self.query_y)}")
        if self.support_y.numel() == 0 or self.query_y.numel() == 0:
            raise UserError("a batch needs at least one task, with at least one support and one query example")

    @property
    def tasks(self) -> int:
        return len(self.support_y)

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        found: list[Tensor] = []
        self.map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def map(self, function: Callable[[Tensor], Tensor]) -> Episodes:
        """The same episodes with a function applied to each tensor, masks too."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Episodes(**{name: map_inputs(function, part) for name, part in parts.items() if part is not None})

    def to(self, *args: Any, **kwargs: Any) -> Episodes:
        """Move or convert the inputs; targets follow the device, and floating ones the type.

        In a tuple or dict of inputs, a type is for the floating ones alone.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def input_to(x: Tensor) -> Tensor:
            return x.to(device, dtype if alone or x.is_floating_point() else None, non_blocking)

        alone = isinstance(self.support_x, Tensor)
        x = map_inputs(input_to, self.support_x)
        floating = [part.dtype for part in tensors_of(x) if part.is_floating_point()]  # tokens say nothing of targets

        def target_to(y: Tensor) -> Tensor:
            return y.to(device, floating[0] if floating and y.is_floating_point() else None, non_blocking)

        masks = (None if mask is None else mask.to(device) for mask in (self.support_mask, self.query_mask))
        query_x = map_inputs(target_to if alone else input_to, self.query_x)
        return Episodes(x, target_to(self.support_y), query_x, target_to(self.query_y), *masks)

    def __getitem__(self, tasks: slice) -> Episodes:
        return self.map(lambda tensor: tensor[tasks])


@overload
def map_inputs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor: ...
@overload
def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs: ...
def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to each tensor of the inputs."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(part) for name, part in x.items()}
    return tuple(function(part) for part in x)


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors of the inputs, in a fixed order."""
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, dict) else x)


def check_examples(x: Any, y: Any, part: str, mask: Any = None) -> None:
    """Raise an error where inputs, targets and mask do not belong together."""
    check_inputs(x, part)
    if not isinstance(y, Tensor):
        raise UserError(f"{part}_y is a tensor, not {type(y).__name__}")
    first = tensors_of(x)[0]
    if y.dim() < 2 or (isinstance(x, Tensor) and (x.dim() < 2 or x.shape[:2] != y.shape[:2])):
        raise UserError(
            f"{part}_x and {part}_y start with [tasks, examples], not {list(first.shape)} and {list(y.shape)}"
        )
    if len(first) != len(y):
        raise UserError(f"{part}_x has {len(first)} tasks and {part}_y {len(y)}")
    if mask is not None:
        check_mask(mask, y.shape[:2], part)
    labels = not (y.is_floating_point() or y.dtype == torch.bool)
    if labels and y.is_cpu and ((y if mask is None else y[mask]) == IGNORED).any():
        raise UserError(
            f"{part}_y has a label of {IGNORED}, which stands for no class: leave such examples out by {part}_mask"
        )


def check_inputs(x: Any, part: str) -> None:
    """Raise an error unless these are tensors of ordinary kinds, with the same number of tasks."""
    parts = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
    if not parts or not all(isinstance(one, Tensor) for one in parts):
        kinds = ", ".join(type(one).__name__ for one in parts) or "nothing"
        raise UserError(f"{part}_x is a tensor, or a tuple or dict of tensors, not {kinds}")
    for one in parts:
        if one.layout != torch.strided or one.is_complex():
            kind = "complex numbers" if one.is_complex() else f"the layout {str(one.layout).removeprefix('torch.')}"
            raise UserError(f"{part}_x has {kind}: only dense tensors of real numbers are possible")
        if one.is_meta:
            raise UserError(f"{part}_x is on the device meta, where tensors have no values")
        if one.dim() < 1 or len(one) != len(parts[0]):
            raise UserError(f"the tensors of {part}_x start with the same number of tasks, not {list(one.shape)}")


def check_mask(mask: Any, shape: torch.Size | None, part: str) -> None:
    """Raise an error unless this is a mask of that shape, [tasks, examples], with an example for every task."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2 or shape not in (None, mask.shape):
        wanted = "[tasks, examples]" if shape is None else list(shape)
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"{part}_mask is a bool tensor {wanted}, True for a real example, not {found}")
    if mask.is_cpu and not mask.any(1).all():
        task = int(mask.any(1).int().argmin())
        raise UserError(f"task {task} of the batch has no real {part} example: its row of {part}_mask is all False")


class Shape(NamedTuple):
    """How many classes, support and query examples of each a task has."""

    ways: int = 5
    """Classes of a task."""
    shots: int = 1
    """Support examples of each class."""
    queries: int = 15
    """Query examples of each class."""


def whole_shape(shape: Any) -> Shape:
    """Ways, shots and queries, as a `Shape` or a plain tuple has them."""
    if not isinstance(shape, tuple | list) or len(shape) != len(Shape._fields):
        raise UserError(f"a shape is (ways, shots, queries), such as gs.Shape(5, 1, 15), not {short_repr(shape)}")
    for name, value in zip(Shape._fields, shape, strict=True):
        check_whole(name, value, 1)
    return Shape(*shape)


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
