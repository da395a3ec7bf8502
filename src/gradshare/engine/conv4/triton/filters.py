"""Gradients by filters: sums over positions, taken in parts and added up for all layers at once."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradshare.engine.conv4.triton import device, launch
from gradshare.engine.conv4.triton.device import OVERLAPPED
from gradshare.engine.conv4.triton.launch import DOT, Blocks, Pair, Precision, _channels

SUMMED = Blocks(positions=128, depth=32, warps=4, stages=0)
CORRELATION = {  # positions: rows of the result
    "float32": Blocks(64, 32, 4, 2),
    "tf32": Blocks(64, 32, 4, 3),
    "bf16": Blocks(64, 64, 4, 3),
}


def splits(tasks: int, positions: int, rows: int, precision: Precision, place: torch.device) -> tuple[int, int]:
    """In how many parts `correlate` sums, and over how many positions each."""
    tile = CORRELATION[precision]
    groups = -(-rows // min(tile.positions, _channels(rows)))
    share = -(-3 * launch._processors(place) // (tasks * groups))
    wanted = max(1, min(-(-positions // (2 * tile.depth)), share))
    chunk = -(-positions // (wanted * tile.depth)) * tile.depth
    return -(-positions // chunk), chunk


def correlate(
    pairs: list[Pair],  # [tasks, n, H, W, C] images and [tasks, n, H, W, O] gradients
    taps: int,
    precision: Precision,
    room: Tensor,  # for the parts, [tasks * parts * taps * C * O]
    parts: tuple[int, int],  # from `splits`
    bias_room: Tensor | None = None,  # [tasks * parts * O]
) -> None:
    """Write parts of the gradient by the filters, [tasks, parts, taps * C, O], summed over the pairs.

    With a room for it, also those of the gradient by a bias: the sum of the first pair's gradients.
    """
    (a, gradient_a), (b, gradient_b) = pairs[0], pairs[-1]
    tasks, n, height, width, source = a.shape
    channels = gradient_a.shape[-1]
    tile = CORRELATION[precision]
    rows = min(tile.positions, _channels(taps * source))
    count, chunk = parts
    device.correlate[(-(-taps * source // rows), count, tasks)](
        a, gradient_a, b, gradient_b, room, room if bias_room is None else bias_room, n * height * width, height, width,
        chunk,
        SOURCE=source, TARGET=channels, TAPS=taps, PAIRS=len(pairs), BIAS=bias_room is not None,
        BR=rows, BN=_channels(channels), BP=tile.depth,
        PRECISION=DOT[precision], num_warps=4 if rows < 128 else tile.warps, num_stages=tile.stages, **OVERLAPPED,
    )  # fmt: skip


class Rooms(NamedTuple):
    """Where sums that are taken in parts have their parts, and how these go into one vector [tasks, size]."""

    tasks: int
    size: int
    elements: int  # of the whole room
    slices: tuple[slice, ...]
    table: Tensor  # see `device.add_parts`

    def empty(self) -> Tensor:
        return torch.empty(self.elements, dtype=torch.float32, device=self.table.device)

    def add(self, room: Tensor) -> Tensor:  # [tasks, size]
        """Add the parts up, all layers at once; zero where there are none."""
        target = torch.empty(self.tasks, self.size, dtype=torch.float32, device=room.device)
        device.add_parts[(len(self.table), self.tasks)](
            room,
            self.table,
            target,
            self.size,
            BLOCK=SUMMED.positions,
            MOST=SUMMED.depth,
            num_warps=SUMMED.warps,
            **OVERLAPPED,
        )
        return target


@cache
def rooms(
    sums: tuple[tuple[int, int, int], ...],  # offset in the vector, parts, elements of each; in the vector's order
    tasks: int,
    size: int,
    place: torch.device,
) -> Rooms:
    rows: list[tuple[int, ...]] = []
    slices, used, done = [], 0, 0
    for offset, parts, elements in (*sums, (size, 0, 0)):
        for at in range(done, offset, SUMMED.positions):  # nothing is summed here
            rows.append((0, 0, 0, at, 0, min(SUMMED.positions, offset - at)))
        for at in range(0, elements, SUMMED.positions):
            here = min(SUMMED.positions, elements - at)
            rows.append((used + at, parts, elements, offset + at, here, here))
        slices.append(slice(used, used + tasks * parts * elements))
        used, done = used + tasks * parts * elements, offset + elements
    return Rooms(tasks, size, used, tuple(slices[:-1]), torch.tensor(rows, dtype=torch.int32).to(place))
