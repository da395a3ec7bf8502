"""Tensors in, tensors out: each function here runs one program of `device.py` for all tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.conv4.triton import device, pooling, small
from gradshare.engine.conv4.triton.device import INTERPRETED, OVERLAPPED

Precision = Literal["float32", "tf32", "bf16"]
Pair = tuple[Tensor, Tensor]

DOT: dict[str, str] = {"float32": "ieee", "tf32": "ieee" if INTERPRETED else "tf32", "bf16": "tf32"}
MOST_PARTS = 128  # that are added up at a time


class Sums(NamedTuple):
    """What a convolution also sums over its result; see `device.convolve`."""

    kind: Literal["none", "moments", "means", "pooled"]
    z: Tensor | None = None  # "means": the block's z; "pooled": its peak
    statistics: Tensor | None = None
    code: Tensor | None = None
    over: int = 0  # "pooled": the positions before pooling
    eps: float = 0.0
    slope: float = 0.0


class Blocks(NamedTuple):
    """Tile sizes."""

    positions: int
    depth: int
    warps: int
    stages: int


ELEMENTWISE = Blocks(positions=32, depth=0, warps=4, stages=0)
REDUCTION = Blocks(positions=32, depth=0, warps=4, stages=0)


@cache
def _processors(place: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(place).multi_processor_count


@cache
def _counters(place: torch.device) -> Tensor:
    """Zeros that every program leaves as it found them. Programs run one after the other, so one array serves all."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=place)


def _channels(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@cache
def _side(place: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(place)


class Aside:
    """Work beside the main stream that nothing needs until `join`: small programs leave most of a GPU idle."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.kept: list[Any] = []

    @contextmanager
    def __call__(self, *used: Any) -> Iterator[None]:
        """Launch aside; what is `used` is kept until the streams have joined, so that its memory is not given away."""
        if INTERPRETED:
            yield
            return
        self.kept += used
        side = _side(self.place)
        side.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(side):
            yield

    def join(self) -> None:
        if not INTERPRETED:
            torch.cuda.current_stream(self.place).wait_stream(_side(self.place))


def _programs(x: Tensor, tiles: int, each: int = 2) -> int:
    """Programs for each task, so that all tasks together fill the GPU `each` times."""
    return max(1, min(tiles, each * _processors(x.device) // len(x)))


def _at_a_time(programs: int) -> int:
    return min(triton.next_power_of_2(programs), MOST_PARTS)


def _tile(x: Tensor, positions: int) -> Blocks:
    """Large tiles, unless there would be too few of them to fill the GPU."""
    if INTERPRETED:
        return Blocks(64, 32, 4, 1)
    processors, depth = _processors(x.device), 128 // x.element_size()
    if len(x) * -(-positions // 128) >= processors:
        return Blocks(128, depth // 2, 4, 4)
    if len(x) * -(-positions // 64) >= processors:
        return Blocks(64, depth, 4, 3)
    return Blocks(32, depth, 4, 3)


def convolve(
    pairs: list[Pair],  # [tasks, n, H, W, C] images and [tasks, taps * C, O] weights (O, C swapped where adjoint)
    channels: int,  # of the result
    taps: int,
    precision: Precision,
    adjoint: bool = False,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the pairs' convolutions, [tasks, n, H, W, channels], and its sums [tasks, 2, channels]."""
    (a, weight_a), (b, weight_b) = pairs[0], pairs[-1]
    tasks, n, height, width, source = a.shape
    positions = n * height * width
    target = a.new_empty(tasks, n, height, width, channels)
    tile = _tile(a, positions)
    tiles = -(-positions // tile.positions)
    programs = _programs(a, tiles) if sums else tiles
    block = _channels(channels)
    parts = a.new_empty(tasks, programs if sums else 0, 2, block, dtype=torch.float32)
    result = a.new_empty(tasks, 2, channels, dtype=torch.float32)
    sums = sums or Sums("none")
    device.convolve[(programs, tasks)](
        a, weight_a, b, weight_b, target, target if sums.z is None else sums.z,
        result if sums.statistics is None else sums.statistics, target if sums.code is None else sums.code,
        parts, _counters(a.device), result,
        positions, height, width, _sixteens(weight_a), _sixteens(weight_b), tiles, sums.over or positions, sums.eps,
        sums.slope,
        SOURCE=source, TARGET=channels, TAPS=taps, FLIP=adjoint, PAIRS=len(pairs), SUMS=sums.kind,
        BM=tile.positions, BN=block, BK=min(tile.depth, _channels(taps * source)),
        PARTS=_at_a_time(programs) if sums.kind != "none" else 1, PRECISION=DOT[precision],
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAPPED,
    )  # fmt: skip
    return target, result


def _sixteens(weight: Tensor) -> int:
    """The stride between tasks in units of 16 elements."""
    stride = weight.stride(0)
    assert stride % 16 == 0 or len(weight) == 1, "weights of a task are not padded to a multiple of 16"
    return stride // 16


def pool(
    z: Tensor, statistics: Tensor, gain: Tensor, bias: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor]:  # [tasks, n, H/2, W/2, C] each
    """The block's output; y at the largest element of each window; and which element that is."""
    tasks, n, height, width, channels = z.shape
    target = z.new_empty(tasks, n, height // 2, width // 2, channels)
    peak, code = torch.empty_like(target), torch.empty_like(target, dtype=torch.uint8)
    windows = n * (height // 2) * (width // 2)
    grid, sizes = _elementwise(tasks, windows, channels)
    pooling.pool[grid](
        z, statistics, gain, bias, target, peak, code, windows, height, width, slope, C=channels, **sizes, **OVERLAPPED
    )
    return target, peak, code


def _elementwise(tasks: int, windows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block = 64 if INTERPRETED else ELEMENTWISE.positions
    return (-(-windows // block), tasks), {"BM": block, "BN": _channels(channels), "num_warps": ELEMENTWISE.warps}


def _reduction(x: Tensor, windows: int, channels: int) -> tuple[tuple[int, int], int, Tensor, dict[str, int]]:
    """Grid, tiles, room for the parts, and sizes."""
    block = 64 if INTERPRETED else REDUCTION.positions
    tiles = -(-windows // block)
    programs = _programs(x, tiles, each=4)
    parts = x.new_empty(len(x), programs, 2, _channels(channels), dtype=torch.float32)
    sizes = {
        "BM": block,
        "BN": _channels(channels),
        "PARTS": _at_a_time(programs),
        "num_warps": REDUCTION.warps,
    }
    return (programs, len(x)), tiles, parts, sizes


def pooled_means(gradient: Tensor, peak: Tensor, code: Tensor, positions: int, slope: float) -> Tensor:
    """mean(a) and mean(a y) [tasks, 2, C] for a, the gradient by the normalised activations."""
    tasks, channels = len(gradient), gradient.shape[-1]
    windows = gradient[0].numel() // channels
    grid, tiles, parts, sizes = _reduction(gradient, windows, channels)
    result = gradient.new_empty(tasks, 2, channels, dtype=torch.float32)
    pooling.pooled_means[grid](
        gradient,
        peak,
        code,
        parts,
        _counters(gradient.device),
        result,
        windows,
        positions,
        tiles,
        slope,
        C=channels,
        **sizes,
        **OVERLAPPED,
    )
    return result


def gather(
    q: Tensor, peak: Tensor, code: Tensor, gradient: Tensor, statistics: Tensor, gain: Tensor, means_q: Tensor,
    means_a: Tensor, slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gain P(q) at the largest element of each window, through the activation; and mean(a P(q)) [tasks, C]."""
    tasks, _, height, width, channels = q.shape
    windows = peak[0].numel() // channels
    grid, tiles, parts, sizes = _reduction(q, windows, channels)
    target = torch.empty_like(peak)
    result = q.new_empty(tasks, channels, dtype=torch.float32)
    pooling.gather[grid](
        q, peak, code, gradient, statistics, gain, means_q, means_a, target, parts, _counters(q.device), result,
        windows, height, width, tiles, slope, C=channels, **sizes, **OVERLAPPED,
    )  # fmt: skip
    return target, result


class Second(NamedTuple):
    """What the outer gradient by z needs beyond the first order's."""

    q: Tensor
    means_q: Tensor
    means_aq: Tensor
    later: Tensor
    means_later: Tensor


def spread(
    z: Tensor, statistics: Tensor, gain: Tensor, code: Tensor, gradient: Tensor, means: Tensor, slope: float,
    second: Second | None = None,
) -> Tensor:  # fmt: skip
    """The gradient by the convolution's output z, [tasks, n, H, W, C]."""
    tasks, n, height, width, channels = z.shape
    target = torch.empty_like(z)
    windows = n * ((height + 1) // 2) * ((width + 1) // 2)
    more = second or Second(z, means, means, gradient, means)
    grid, sizes = _elementwise(tasks, windows, channels)
    pooling.spread[grid](
        z, statistics, gain, code, gradient, means, more.q, more.means_q, more.means_aq, more.later, more.means_later,
        target, windows, n, height, width, slope, C=channels, SECOND=second is not None, **sizes, **OVERLAPPED,
    )  # fmt: skip
    return target


def to_norms(means: list[Tensor], more: list[Tensor] | None, positions: list[int]) -> Tensor:  # [blocks, 2, C]
    """The gradient by the gains and biases of all blocks, from means that are [tasks, 2, C], and more, [tasks, C]."""
    tasks, _, channels = means[0].shape
    target = means[0].new_empty(len(means), 2, channels)
    small.to_norms[(len(means),)](
        *means, *(more or means), target, *positions, tasks,
        C=channels, BN=_channels(channels), BT=_at_a_time(tasks), MORE=more is not None, **OVERLAPPED,
    )  # fmt: skip
    return target
