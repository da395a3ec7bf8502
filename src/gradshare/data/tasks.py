"""Tasks from labelled data: arrays, tensors or a PyTorch `Dataset` become a source of tasks for `gs.train`.

Rows are drawn by the same code as those of a store, in `gradshare.data.drawing`. Then these rows alone are taken.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from gradshare.data.dataset import Dataset as StoredImages
from gradshare.data.drawing import PLURALS, Kind, Part, SplitRows, Units, as_tensor, picker, split_rows
from gradshare.data.splits import some
from gradshare.errors import MOST_SEED, UserError, check_whole, say, short_repr
from gradshare.method import SPLITS
from gradshare.method.episodes import IGNORED, Episodes, Shape, TaskSource, tensors_of, whole_shape

By = Literal["class", "example"]
Device = torch.device | str
MOST_OF_FREE = 0.5  # of a GPU's free memory, for a data set
IGNORED_LABEL = f"y holds {IGNORED}, which stands for no class: leave these examples out"
QUIET, EVERY = 2.0, 10.0  # seconds of reading labels before the first line of progress, and between lines


def tasks(
    x: Any,
    y: Any = None,
    *,
    splits: Sequence[float] | Mapping[str, Any] = (0.64, 0.16, 0.20),
    by: By = "class",
    groups: Any = None,
    seed: int = 0,
) -> Tasks:
    """Make a source of tasks from labelled examples, for `gs.train`, `gs.evaluate` and loops of your own.

    A task has `ways` classes, with `shots` support and `queries` query examples of each; its labels are 0 to ways - 1.
    With `groups`, a task is one group, with `shots` support and `queries` query examples in all, and its labels or
    real-valued targets keep their meaning; `ways` is not used. Nothing is drawn twice within a task.

    Examples come as they are: nothing is scaled, and bytes stay bytes. But float64 arrays of NumPy come in PyTorch's
    default type, whole-number targets as int64, and targets that are text as their place in the sorted list of them.

    Args:
        x: the inputs, [examples, ...]: a NumPy array or a tensor, or a tuple or dict of them. Or a PyTorch `Dataset`
            of pairs (x, y) with a length, such as those of torchvision: an example is read when it is drawn. Its labels
            are `y` if given, else its attribute `targets` or `labels`; else all examples are read once for them.
        y: the labels, [examples], of any kind: numbers, text. With `groups` also real-valued targets, [examples, ...].
        splits: how much train, val and test get: three fractions that sum to 1, three whole numbers of classes (or
            groups), or lists of them, `{"train": [...], "val": [...], "test": [...]}`. A split may be empty.
        by: `"class"`: a class (or group) is in one split alone. `"example"`: all of them are in every split, and
            `splits` divides the examples of each.
        groups: the group of each example, [examples]: a person, a device, a font.
        seed: which classes (or groups, or examples) go to which split.

    Example:
        >>> import gradshare as gs, torch
        >>> x, y = torch.randn(200, 8), torch.arange(10).repeat(20)
        >>> source = gs.tasks(x, y, splits=(5, 0, 5))
        >>> source
        gs.tasks([200, 8] float32, 10 classes: train 5, val 0, test 5)
        >>> source.sample("train", gs.Shape(ways=5, shots=1, queries=15), tasks=4, key=(0, 0)).query_x.shape
        torch.Size([4, 75, 8])
    """
    check_whole("seed", seed, 0, MOST_SEED)
    if by not in ("class", "example"):
        raise UserError(f"by is 'class' or 'example', not {short_repr(by)}")
    if isinstance(x, TensorDataset) and len(x.tensors) == 2:
        x, y = x.tensors[0], x.tensors[1] if y is None else y
    examples = _examples(x, y, labels_needed=groups is None)
    kind: Kind = "class" if groups is None else "group"
    coded = _coded(_labels(x, y), "y", len(examples)) if groups is None else _coded(groups, "groups", len(examples))
    if groups is None and IGNORED in coded.names:
        raise UserError(IGNORED_LABEL)
    divide = _divide_units if by == "class" else _divide_examples
    parts = divide(coded, splits, np.random.default_rng(seed), PLURALS[kind])
    return Tasks(examples, Units(kind, coded.names, dict(zip(SPLITS, parts, strict=True))))


@dataclass(frozen=True, repr=False, eq=False)
class Tasks:
    """A source of tasks. `gs.tasks` makes one."""

    _examples: _Arrays | _Read
    _units: Units

    @property
    def names(self) -> dict[str, list[Any]]:
        """The classes, or groups, of each split."""
        return {split: [self._units.names[unit] for unit in own.units] for split, own in self._units.splits.items()}

    def __repr__(self) -> str:
        units = self._units
        return f"gs.tasks({self._examples}, {len(units.names)} {units.plural}: {units.counts()})"

    @property
    def nbytes(self) -> int:
        """Size of the examples that `to` moves."""
        return self._examples.nbytes

    @property
    def fingerprint(self) -> str:
        """Which examples are in which split, in short; `gs.train` records it. The values of `x` do not count."""
        return f"{self}, {self._units.digest()}"

    def to(self, device: Device) -> Tasks:
        """Hold the examples on a device, and draw there. Those of a PyTorch `Dataset` stay where it reads them."""
        return Tasks(self._examples.to(device), self._units)

    def sample(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
        """Draw tasks, uniformly and without replacement within each. The same arguments give the same tasks."""
        shape = whole_shape(shape)
        rows = self._units.draw(split, shape, tasks, key).rows  # [tasks, ways, shots + queries]

        def part(rows: NDArray[np.int64]) -> tuple[Any, Tensor]:
            x, y = self._examples.take(rows.reshape(tasks, -1))
            return x, _places(rows, tensors_of(x)[0].device) if self._units.kind == "class" else y

        return Episodes(*part(rows[..., : shape.shots]), *part(rows[..., shape.shots :]))


def on_device(source: TaskSource, device: torch.device) -> TaskSource:
    """Hold a data set of ours on a device, unless it would take most of a GPU's free memory."""
    if not isinstance(source, StoredImages | Tasks):
        return source
    if device.type == "cuda" and source.nbytes > MOST_OF_FREE * torch.cuda.mem_get_info(device)[0]:
        return source
    return source.to(device)


def _places(rows: NDArray[np.int64], device: torch.device) -> Tensor:  # [tasks, ways, n] -> [tasks, ways*n]
    """Labels of a task: the place of each class among the ways."""
    tasks, ways, each = rows.shape
    return torch.arange(ways, device=device).view(1, ways, 1).expand(tasks, ways, each).flatten(1, 2)


# Examples


@dataclass(frozen=True, repr=False)
class _Arrays:
    """Examples in memory, or mapped into it."""

    x: Any  # an array or a tensor [examples, ...], or a tuple or dict of them
    y: Part | None  # None: labels are places among the ways

    def __len__(self) -> int:
        return len(_parts(self.x)[0])

    def __repr__(self) -> str:
        return str(_map(_Described, self.x))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in [*_parts(self.x), self.y] if part is not None)

    def take(self, rows: NDArray[np.int64]) -> tuple[Any, Any]:
        """The inputs and targets of some rows, [tasks, n] -> [tasks, n, ...]."""
        pick = picker(rows)
        return _map(pick, self.x), None if self.y is None else pick(self.y)

    def to(self, device: Device) -> _Arrays:
        place = torch.device(device)

        def moved(part: Part) -> Part:
            if isinstance(part, Tensor):
                return part.to(place)
            return part if place.type == "cpu" else as_tensor(np.array(part)).to(place)  # a copy may be written to

        return _Arrays(_map(moved, self.x), None if self.y is None else moved(self.y))


@dataclass(frozen=True)
class _Described:
    """How a repr shows an array."""

    part: Part

    def __repr__(self) -> str:
        return f"{list(self.part.shape)} {str(self.part.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, repr=False)
class _Read:
    """Examples of a PyTorch `Dataset`, read when they are drawn."""

    dataset: Dataset[Any]
    y: Part | None  # targets that the user gave
    targets: bool  # whether tasks have the targets of the pairs

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked when it came in

    def __repr__(self) -> str:
        return f"{len(self):,} examples of {type(self.dataset).__name__}"

    @property
    def nbytes(self) -> int:
        return 0  # nothing is moved

    def take(self, rows: NDArray[np.int64]) -> tuple[Any, Any]:
        items = {row: _pair(self.dataset, row) for row in np.unique(rows).tolist()}
        chosen = [items[row] for row in rows.ravel().tolist()]

        def side(number: int, what: str) -> Any:
            stacked = _stack([pair[number] for pair in chosen], f"each {what} of the Dataset, after its transforms,")
            return _map(lambda part: part.unflatten(0, rows.shape), stacked)

        y = side(1, "target") if self.targets else None if self.y is None else picker(rows)(self.y)
        return side(0, "x"), y

    def to(self, device: Device) -> _Read:
        return self


def _pair(dataset: Dataset[Any], row: int) -> tuple[Any, Any]:
    item = dataset[row]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(f"an item of the Dataset is a pair (x, y); number {row} is {_kind(item)}")
    return item[0], item[1]


def _stack(values: list[Any], what: str) -> Any:
    """Examples one by one as one tensor, or as a tuple or dict of them."""
    names = _names(values[0])
    if names is None:
        return _stacked(values, what)
    if any(_names(value) != names for value in values):
        raise UserError(f"{what} must have the same parts")
    parts = {name: _stacked([value[name] for value in values], what) for name in names}
    return parts if isinstance(values[0], dict) else tuple(parts.values())


def _names(example: Any) -> Collection[Any] | None:
    """The names of the parts of an example, or their places; None where it is one array or number."""
    if isinstance(example, dict):
        return example.keys()
    several = isinstance(example, tuple | list) and not all(isinstance(part, int | float) for part in example)
    return range(len(example)) if several else None


def _stacked(values: list[Any], what: str) -> Tensor:
    try:
        return torch.stack([as_tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{_kind(values[0])}: {error}"
        raise UserError(f"{what} must be a tensor, an array or a number, all of one size, not {found}") from None


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"{type(value).__name__}{size}"


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to an array or tensor, or to each of a tuple or dict of them."""
    if isinstance(x, tuple):
        return tuple(map(function, x))
    return {name: function(part) for name, part in x.items()} if isinstance(x, dict) else function(x)


def _parts(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple) else list(x.values()) if isinstance(x, dict) else [x]


# What comes in


def _examples(x: Any, y: Any, labels_needed: bool) -> _Arrays | _Read:
    if _is_dataset(x):
        if isinstance(x, IterableDataset) or not hasattr(x, "__len__"):
            raise UserError("a Dataset of tasks has a length and items by number; an IterableDataset does not")
        if len(x) == 0:
            raise UserError("the Dataset has no example")
        targets = None if labels_needed or y is None else _targets(y, len(x))
        return _Read(x, targets, targets=not labels_needed and y is None)
    inputs = _map(_array, x)
    lengths = {part.shape[0] if part.ndim else 0 for part in _parts(inputs)}
    if len(lengths) != 1 or min(lengths) < 1:
        raise UserError(f"the parts of x have the same number of examples, at least 1, not {sorted(lengths)}")
    if y is None:
        raise UserError("y is missing: give the label of each example")
    examples = _Arrays(inputs, None if labels_needed else _targets(y, min(lengths)))
    first = _parts(inputs)[0]
    return examples.to(first.device) if isinstance(first, Tensor) else examples


def _is_dataset(x: Any) -> bool:
    """Whether examples are read one by one: PyTorch calls anything with a length and items by number a Dataset."""
    if isinstance(x, list | tuple | dict | Tensor) or hasattr(x, "__array__"):
        return False
    return isinstance(x, Dataset) or (hasattr(x, "__getitem__") and hasattr(x, "__len__"))


def _array(value: Any) -> Part:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise UserError(f"x is a dense tensor, not {value.layout}; x.to_dense() makes one")
        return value.detach()
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return _stack(value, "each example of x").detach()
    try:
        array = np.asarray(value)
        if array.ndim == 0:
            raise TypeError(f"it is {type(value).__name__}")
        as_tensor(array[:1].copy())
    except (ValueError, TypeError) as error:
        raise UserError(f"x is an array of numbers, a tuple or dict of them, or a PyTorch Dataset: {error}") from None
    return array


def _targets(y: Any, examples: int) -> Part:
    """Targets of tasks that are groups: they keep their meaning."""
    if isinstance(y, Tensor):
        values: Part = y.detach()
    else:
        array = _entries(y, "y")
        values = array if array.dtype.kind in "biuf" else _coded(y, "y", examples).codes
    _check_length("y", values, examples)
    floating = values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    if floating and (values != values).any():  # type: ignore[union-attr]
        raise UserError("y holds NaN: leave out the examples that have no target")
    if not floating and (values == IGNORED).any():
        raise UserError(IGNORED_LABEL)
    if floating:
        return values
    return values.to(torch.int64) if isinstance(values, Tensor) else values.astype(np.int64)


def _entries(values: Any, argument: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UserError(f"{argument} has one entry an example, all of one size: {error}") from None


def _check_length(name: str, values: Any, examples: int) -> None:
    found = values.shape[0] if values.ndim else 0
    if found != examples:
        raise UserError(f"{name} has {found} entries and x {examples} examples; they belong together one by one")


def _labels(x: Any, y: Any) -> Any:
    """The labels: as given, or those of a PyTorch `Dataset`."""
    known = _known_labels(x) if y is None else y
    return _read_labels(x) if known is None else known


def _known_labels(dataset: Any) -> Any:
    """The labels that a `Dataset` lists; None if it lists none, or changes them when they are read."""
    if isinstance(dataset, Subset):
        known = _known_labels(dataset.dataset)
        return None if known is None else [known[row] for row in dataset.indices]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    found = [getattr(dataset, name, None) for name in ("targets", "labels")]
    return next((labels for labels in found if labels is not None and len(labels) == len(dataset)), None)


def _read_labels(dataset: Any) -> list[Any]:
    """Read every example for its label, with progress on stderr if that takes long."""
    labels, due = [], time.monotonic() + QUIET  # due: when to print the next line
    for row in range(len(dataset)):
        label = _pair(dataset, row)[1]
        labels.append(label.item() if isinstance(label, Tensor | np.generic) and label.ndim == 0 else label)
        if time.monotonic() > due:
            due = time.monotonic() + EVERY
            say(f"gs.tasks reads all labels, once (y= saves it): {row + 1:,} of {len(dataset):,}", error=True)
    return labels


# Classes or groups


class _Coded(NamedTuple):
    """Labels or groups as whole numbers."""

    names: list[Any]  # the different ones, in order
    codes: NDArray[np.int64]  # [examples]: places in `names`

    def rows(self) -> list[NDArray[np.int64]]:
        """The rows of each name."""
        return np.split(np.argsort(self.codes, kind="stable"), np.bincount(self.codes).cumsum()[:-1])


def _coded(values: Any, argument: str, examples: int) -> _Coded:
    array = _entries(values.detach().cpu() if isinstance(values, Tensor) else values, argument)
    if array.ndim != 1:
        raise UserError(f"{argument} has one entry an example, [examples], not {list(array.shape)}")
    _check_length(argument, array, examples)
    if array.dtype.kind == "O":
        return _coded_objects(array.tolist(), argument)
    if array.dtype.kind == "f" and not (array == array.round()).all():
        hint = "; for real-valued targets give groups=, so that a task is one group" if argument == "y" else ""
        raise UserError(f"{argument} holds numbers that are not whole, or NaN{hint}")
    names, codes = np.unique(array, return_inverse=True)
    return _Coded(names.tolist(), codes.astype(np.int64))


def _coded_objects(values: list[Any], argument: str) -> _Coded:
    for row, value in enumerate(values):
        if value is None or value != value:
            raise UserError(f"{argument} has nothing for example {row}: it is {value!r}")
    try:
        names = sorted(set(values), key=lambda name: (type(name).__name__, name))
    except TypeError:
        raise UserError(f"{argument} holds values that cannot be sorted, such as {short_repr(values[0])}") from None
    places = {name: place for place, name in enumerate(names)}
    return _Coded(names, np.array([places[value] for value in values], dtype=np.int64))


# Splits


def _divide_units(coded: _Coded, splits: Any, generator: np.random.Generator, plural: str) -> list[SplitRows]:
    """Each class (or group) is in one split, with all of its examples."""
    rows = coded.rows()
    if isinstance(splits, Mapping):
        chosen = _named(coded.names, splits, plural)
    else:
        sizes = _sizes(splits, len(rows), plural)
        chosen = np.split(generator.permutation(len(rows)), np.cumsum(sizes))[: len(SPLITS)]
    return [split_rows(own, [rows[place] for place in own]) for own in map(np.sort, chosen)]


def _divide_examples(coded: _Coded, splits: Any, generator: np.random.Generator, plural: str) -> list[SplitRows]:
    """Each class (or group) is in every split, with a part of its examples."""
    if isinstance(splits, Mapping):
        raise UserError(f"by='example' puts all {plural} in every split: give splits as fractions or numbers")
    parts: list[dict[int, NDArray[np.int64]]] = [{}, {}, {}]
    for place, own in enumerate(coded.rows()):
        sizes = _sizes(splits, len(own), f"examples of {coded.names[place]!r}")
        for part, chosen in zip(parts, np.split(generator.permutation(own), np.cumsum(sizes)), strict=False):
            if len(chosen):
                part[place] = np.sort(chosen)
    return [split_rows(np.array(list(part), dtype=np.int64), list(part.values())) for part in parts]


def _sizes(splits: Any, count: int, what: str) -> list[int]:
    """How many of `count` train, val and test get."""
    shares = list(splits) if isinstance(splits, Sequence | np.ndarray) and not isinstance(splits, str) else []
    numbers = all(isinstance(share, int | float | np.number) and 0 <= share < float("inf") for share in shares)
    if len(shares) != len(SPLITS) or not numbers or any(isinstance(share, bool) for share in shares):
        raise UserError(
            f"splits is three numbers for train, val and test, such as (0.64, 0.16, 0.2) or (5, 0, 5), or"
            f' {{"train": [...], "val": [...], "test": [...]}}, not {short_repr(splits)}'
        )
    if all(isinstance(share, int | np.integer) for share in shares):
        if sum(shares) > count:
            raise UserError(f"splits={tuple(shares)} asks for {sum(shares)} {what}; there are {count}")
        return [int(share) for share in shares]
    if abs(sum(shares) - 1) > 1e-6:
        raise UserError(f"splits={tuple(shares)} are fractions that sum to {sum(shares):.6g}; they must sum to 1")
    return _apportioned([float(share) for share in shares], count, what)


def _apportioned(shares: list[float], count: int, what: str) -> list[int]:
    """Whole numbers nearest to the shares; a share above 0 gets at least 1.

    Example:
        >>> _apportioned([0.64, 0.16, 0.20], 10, "classes")
        [6, 2, 2]
    """
    exact = [share * count for share in shares]
    sizes = [int(value + 1e-9) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda n: sizes[n] - exact[n])
    for n in by_rest[: count - sum(sizes)]:
        sizes[n] += 1
    for n, share in enumerate(shares):
        if share > 0 and sizes[n] == 0:
            largest = max(range(len(shares)), key=lambda m: sizes[m])
            if sizes[largest] < 2:
                raise UserError(f"{count} {what} are too few for splits={tuple(shares)}: give other splits")
            sizes[largest], sizes[n] = sizes[largest] - 1, 1
    return sizes


def _named(names: list[Any], splits: Mapping[str, Any], plural: str) -> list[NDArray[np.int64]]:
    """The classes (or groups) that a mapping names; those that it does not name are left out."""
    if not splits or not set(splits) <= set(SPLITS):
        raise UserError(f"splits names train, val and test, not {', '.join(map(str, splits)) or 'nothing'}")
    for split, own in splits.items():
        if isinstance(own, str) or not isinstance(own, Iterable):
            raise UserError(f"splits[{split!r}] is a list of {plural}, not {short_repr(own)}")
    given = [splits.get(split, ()) for split in SPLITS]
    wanted = [own.tolist() if isinstance(own, np.ndarray | Tensor) else list(own) for own in given]
    twice = [name for name, count in Counter(chain(*wanted)).items() if count > 1]
    if twice:
        raise UserError(f"splits names {len(twice)} {plural} twice: {some(map(repr, twice))}")
    places = {name: place for place, name in enumerate(names)}
    unknown = [name for name in chain(*wanted) if name not in places]
    if unknown:
        raise UserError(f"splits names {len(unknown)} {plural} that no example has: {some(map(repr, unknown))}")
    return [np.array([places[name] for name in own], dtype=np.int64) for own in wanted]
