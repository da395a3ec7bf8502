"""The first block: tensors in, tensors out, by the programs of `stem.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.conv4.triton import filters, launch, stem
from gradshare.engine.conv4.triton.device import OVERLAPPED
from gradshare.engine.conv4.triton.launch import DOT, Blocks, Precision

PATCHES = Blocks(positions=64, depth=0, warps=4, stages=0)
TILE = Blocks(positions=32, depth=0, warps=4, stages=0)


class Patches(NamedTuple):
    """A task's images as 3x3 patches, with their moments."""

    x: Tensor  # [tasks, n, H, W, K], K = 9 * channels, padded to a multiple of 16
    mean: Tensor  # [tasks, BK]
    covariance: Tensor  # [tasks, BK, BK]

    @property
    def positions(self) -> int:
        return self.x[0].numel() // self.x.shape[-1]


def patches(x: Tensor, precision: Precision) -> Patches:  # [tasks, n, C, H, W]
    """Images as patches, in the type of the activations."""
    tasks, n, channels, height, width = x.shape
    x = x.contiguous()
    size = -(-9 * channels // 16) * 16
    block = triton.next_power_of_2(size)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    target = x.new_empty(tasks, n, height, width, size, dtype=kind)
    positions = n * height * width
    centre = x[:, 0].float().mean((-2, -1))
    stem.patches[(-(-positions // PATCHES.positions), tasks)](
        x, centre, target, positions, height, width,
        C=channels, K=size, BK=block, BM=PATCHES.positions, num_warps=PATCHES.warps, **OVERLAPPED,
    )  # fmt: skip
    count, chunk = filters.splits(tasks, positions, size, precision, x.device)
    squares = x.new_empty(tasks, count, size, size, dtype=torch.float32)
    sums = x.new_empty(tasks, count, size, dtype=torch.float32)
    filters.correlate([(target, target)], 1, precision, squares, (count, chunk), sums)
    mean, square = sums.sum(1) / positions, squares.sum(1) / positions
    covariance = torch.addcmul(square, mean[:, :, None], mean[:, None, :], value=-1)
    if more := block - size:
        mean, covariance = F.pad(mean, (0, more)), F.pad(covariance, (0, more, 0, more))
    return Patches(target, mean, covariance)


class Moments(NamedTuple):
    statistics: Tensor  # [tasks, 2, C]: mean and 1 / deviation of z
    spread: Tensor  # [tasks, BK, BN]: covariance x weight


def _sizes(patches: Patches, weight: Tensor) -> dict[str, int]:
    rows, channels = weight.shape[1:]
    return {"K": rows, "C": channels, "BK": patches.mean.shape[-1], "BN": launch._channels(channels)}


def moments(patches: Patches, weight: Tensor, eps: float) -> Moments:
    sizes, tasks = _sizes(patches, weight), len(weight)
    statistics = patches.mean.new_empty(tasks, 2, sizes["C"])
    spread = patches.mean.new_empty(tasks, sizes["BK"], sizes["BN"])
    stem.moments[(tasks,)](
        weight,
        patches.covariance,
        patches.mean,
        statistics,
        spread,
        launch._sixteens(weight),
        eps,
        **sizes,
        **OVERLAPPED,
    )
    return Moments(statistics, spread)


def cross_moments(patches: Patches, weight: Tensor, own: Moments) -> Moments:
    """mean(q) and mean(q y) for q = X v, and covariance x v."""
    sizes = _sizes(patches, weight)
    means, spread = torch.empty_like(own.statistics), torch.empty_like(own.spread)
    stem.cross_moments[(len(weight),)](
        weight, patches.covariance, patches.mean, own.statistics, own.spread, means, spread, launch._sixteens(weight),
        **sizes, **OVERLAPPED,
    )  # fmt: skip
    return Moments(means, spread)


def forward(
    patches: Patches, weight: Tensor, own: Moments, gain: Tensor, bias: Tensor, slope: float, precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:  # [tasks, n, H/2, W/2, C] each
    """The block's output; y at the largest element of each window; and which element that is."""
    tasks, n, height, width, _ = patches.x.shape
    target = patches.x.new_empty(tasks, n, height // 2, width // 2, weight.shape[-1])
    peak, code = torch.empty_like(target), torch.empty_like(target, dtype=torch.uint8)
    windows = n * (height // 2) * (width // 2)
    stem.forward[(-(-windows // TILE.positions), tasks)](
        patches.x, weight, own.statistics, gain, bias, target, peak, code, windows, patches.positions, height, width,
        launch._sixteens(weight), slope, **_sizes(patches, weight), BM=TILE.positions, PRECISION=DOT[precision],
        num_warps=TILE.warps, **OVERLAPPED,
    )  # fmt: skip
    return target, peak, code


def parts(patches: Patches) -> int:
    """In how many parts `correlate` sums."""
    _, n, height, width, _ = patches.x.shape
    return launch._programs(patches.x, -(-n * (height // 2) * (width // 2) // TILE.positions), each=2)


def correlate(
    patches: Patches, gradient: Tensor, code: Tensor, slope: float, precision: Precision, room: Tensor
) -> None:
    """Write parts of X^T a, [tasks, parts, K, C]."""
    tasks, _, height, width, size = patches.x.shape
    channels = gradient.shape[-1]
    windows = gradient[0].numel() // channels
    stem.correlate[(parts(patches), tasks)](
        patches.x, gradient, code, room, windows, patches.positions, height, width, -(-windows // TILE.positions),
        slope,
        K=size, C=channels, BK=patches.mean.shape[-1], BN=launch._channels(channels), BM=TILE.positions,
        PRECISION=DOT[precision], num_warps=TILE.warps, **OVERLAPPED,
    )  # fmt: skip


class Second(NamedTuple):
    """What the outer gradient needs beyond the first order's."""

    sparse_a: Tensor
    cross: Moments
    means_aq: Tensor
    means_later: Tensor


def finish(
    target: Tensor,  # [tasks, K, C]: X^T a, to become the gradient by the filters
    patches: Patches,
    own: Moments,
    gain: Tensor,
    means_a: Tensor,
    second: Second | None = None,
) -> Tensor:  # [tasks, BK, BN]
    """From the sum over pooled elements to the gradient by the filters. Returns X^T a."""
    sizes = _sizes(patches, target)
    more = second or Second(torch.empty_like(own.spread), own, means_a, means_a)
    rows = 16
    stem.finish[(sizes["BK"] // rows, len(target))](
        target, patches.mean, own.spread, own.statistics, gain, means_a, more.sparse_a, more.cross.spread,
        more.cross.statistics, more.means_aq, more.means_later, float(patches.positions), launch._sixteens(target),
        **sizes, ROWS=rows, SECOND=second is not None, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return more.sparse_a


def gather(
    patches: Patches, weight: Tensor, peak: Tensor, code: Tensor, gradient: Tensor, own: Moments, gain: Tensor,
    cross: Moments, means_a: Tensor, slope: float, precision: Precision,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `launch.gather`, for q = X v."""
    tasks, _, height, width, _ = patches.x.shape
    sizes = _sizes(patches, weight)
    windows = peak[0].numel() // sizes["C"]
    tiles = -(-windows // TILE.positions)
    programs = launch._programs(peak, tiles, each=3)
    target = torch.empty_like(peak)
    room = own.spread.new_empty(tasks, programs, sizes["BN"])
    result = own.spread.new_empty(tasks, sizes["C"])
    stem.gather[(programs, tasks)](
        patches.x, weight, peak, code, gradient, own.statistics, gain, cross.statistics, means_a, target, room,
        launch._counters(peak.device), result, windows, patches.positions, height, width, tiles,
        launch._sixteens(weight), slope, **sizes, BM=TILE.positions, PARTS=launch._at_a_time(programs),
        PRECISION=DOT[precision], num_warps=TILE.warps, **OVERLAPPED,
    )  # fmt: skip
    return target, result
