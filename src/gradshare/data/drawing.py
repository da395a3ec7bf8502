"""Drawing tasks: the units of each split, which are classes or groups, which rows a task gets, and taking them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradshare.data.splits import some
from gradshare.errors import UserError, check_whole, short_repr
from gradshare.method import SPLITS
from gradshare.method.episodes import Shape, choose, whole_shape

Kind = Literal["class", "group"]
PLURALS = {"class": "classes", "group": "groups"}
Part = NDArray[Any] | Tensor


class Drawn(NamedTuple):
    """Which units and rows the tasks of a batch have; a task of groups has one unit."""

    units: NDArray[np.int64]  # [tasks, ways]: places in `Units.names`
    rows: NDArray[np.int64]  # [tasks, ways, shots + queries]


class SplitRows(NamedTuple):
    """The units of a split."""

    units: NDArray[np.int64]  # [n]: places in `Units.names`
    starts: NDArray[np.int64]  # [n]: where its rows start in `rows`
    counts: NDArray[np.int64]  # [n]: number of its rows
    rows: NDArray[np.int64]  # unit after unit


def split_rows(units: NDArray[np.int64], rows: Sequence[NDArray[np.int64]]) -> SplitRows:
    """The units of a split from the rows of each."""
    counts = np.array([len(own) for own in rows], dtype=np.int64)
    return SplitRows(units, counts.cumsum() - counts, counts, np.concatenate([np.empty(0, np.int64), *rows]))


@dataclass(frozen=True, eq=False)
class Units:
    """What tasks are drawn from: classes, of which a task has several, or groups, of which it has one."""

    kind: Kind
    names: Sequence[Any]
    splits: dict[str, SplitRows]
    dataset: str = ""  # its name, for messages
    examples: str = "examples"  # what they are, for messages

    @property
    def plural(self) -> str:
        return PLURALS[self.kind]

    def counts(self) -> str:
        """How many each split has, as text."""
        return ", ".join(f"{split} {len(own.units)}" for split, own in self.splits.items())

    def digest(self) -> str:
        """The same for the same units, splits and rows."""
        found = hashlib.sha256(repr(self.names).encode(errors="backslashreplace"))
        for own in self.splits.values():
            for part in (own.units, own.counts, own.rows):
                found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()[:16]

    def check(self, split: str, shape: Shape) -> None:
        """Raise an error, with the numbers, if the split cannot give such tasks."""
        if split not in SPLITS:
            raise UserError(f"a split is one of {', '.join(SPLITS)}, not {short_repr(split)}")
        shape = whole_shape(shape)
        where = f"the {split} split" + (f" of {self.dataset}" if self.dataset else "")
        counts, needed = self.splits[split].counts, shape.shots + shape.queries
        without = "" if split == "train" else f"; a run with {split}_tasks=0 does without it"
        if len(counts) == 0:
            raise UserError(f"{where} has no {self.plural}{without}")
        if self.kind == "class" and len(counts) < shape.ways:
            raise UserError(f"{shape.ways}-way tasks need {shape.ways} classes; {where} has {len(counts)}{without}")
        if counts.min() < needed:
            self._raise_too_few(split, where, np.flatnonzero(counts < needed), shape)

    def _raise_too_few(self, split: str, where: str, short: NDArray[np.int64], shape: Shape) -> None:
        own = self.splits[split]
        named = some(f"{self.names[own.units[n]]!r} ({own.counts[n]})" for n in short)
        raise UserError(
            f"{shape.shots}-shot with {shape.queries} queries needs {shape.shots + shape.queries} {self.examples} of a"
            f" {self.kind}; {len(short)} of the {len(own.units)} {self.plural} of {where} have fewer: {named}"
        )

    def draw(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Drawn:
        """Choose the rows of tasks, uniformly and without replacement within each."""
        self.check(split, shape)
        check_whole("tasks", tasks, 1)
        own = self.splits[split]
        units, order = choose(own.counts, shape if self.kind == "class" else shape._replace(ways=1), tasks, key)
        return Drawn(own.units[units], own.rows[own.starts[units][..., None] + order])


def picker(rows: NDArray[np.int64]) -> Callable[[Part], Tensor]:
    """Takes rows of arrays and tensors; the rows go to each device once."""
    places: dict[torch.device, Tensor] = {}

    def pick(part: Part) -> Tensor:
        if not isinstance(part, Tensor):
            return as_tensor(part[rows])
        if part.device not in places:
            where = torch.from_numpy(rows)
            if part.is_cuda:  # pinned memory: otherwise the CPU would wait here until the GPU is idle
                where = where.pin_memory()
            places[part.device] = where.to(part.device, non_blocking=True)
        return part[places[part.device]]

    return pick


def as_tensor(value: Any) -> Tensor:
    """A tensor of an array or a number. NumPy makes float64 where nobody asked for it, so that becomes the default."""
    if isinstance(value, np.ndarray) and not value.dtype.isnative:  # such as images of FITS or IDX files
        value = value.astype(value.dtype.newbyteorder("="))
    tensor = torch.as_tensor(value)
    wide = tensor.dtype == torch.float64 and not isinstance(value, Tensor)
    return tensor.to(torch.get_default_dtype()) if wide else tensor
