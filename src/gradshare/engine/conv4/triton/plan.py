"""What the network computes, but for its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradshare.engine.conv4.triton.launch import Precision


class Part(NamedTuple):
    """Where a weight matrix [rows, columns] is in the vector of all weights."""

    offset: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:  # [tasks, P] -> [tasks, rows, columns]
        return flat[:, self.offset : self.offset + self.rows * self.columns].unflatten(1, (self.rows, self.columns))


@dataclass(frozen=True)
class Plan:
    """What the network computes, but for its tensors."""

    filters: tuple[Part, ...]  # of each block
    head: Part
    head_bias: Part
    size: int  # of the vector of all weights
    eps: tuple[float, ...]  # of each block
    slope: float
    precision: Precision
