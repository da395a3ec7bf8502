# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""The first block, whose images do not change between inner steps, with its first and second derivative.

Let X be the 3x3 patches of a task's images and C their covariance. The sums that batch norm needs of z = X w follow
from X's mean and C alone:

    mean(z) = mean(X) w        var(z) = w^T C w        mean(q y) = v^T C w / s   for q = X v        X^T y = N C w / s

So the block runs in one pass and does not store z. Its gradients with respect to w are sums over the pooled elements
(X^T a, with a as in `pooled_norm.py`) and terms in C. Everything else is computed again from X.

`cw` and `cv` are the products C w and C v, and `xa` is X^T a, all [tasks, BK, BN]. K is the number of rows of a filter
matrix, BK and BN are K and the number of channels padded to powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.backends import Precision
from gradshare.engine.conv4.triton import convolution
from gradshare.engine.conv4.triton.device import (
    DOT,
    OVERLAPPED,
    ROUNDED,
    Tile,
    counters,
    factor,
    last_to_arrive,
    padded_channels,
    parts_at_a_time,
    programs_for,
    sixteens,
    sum_of_parts,
    through_activation,
    wait,
)
from gradshare.engine.vmapped import Kept

PATCHES = Tile(positions=64, depth=0, warps=4, stages=0)
TILE = Tile(positions=32, depth=0, warps=4, stages=0)


@triton.jit(do_not_specialize=["positions", "H", "W"])
def patches_program(
    x, centre, target, positions, H, W,
    C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, ROUND: tl.constexpr = False,
):  # fmt: skip
    """target = 3x3 patches of images [tasks, n, C, H, W], minus `centre` [tasks, C].

    A constant that is subtracted from all pixels, also from the zeros around the image, has no effect after batch norm.
    It keeps the covariance accurate.
    """
    wait()
    task = tl.program_id(1).to(tl.int64)
    x += task * positions * C
    target += task * positions * K
    k = tl.arange(0, BK)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    tap, channel = k // C, k % C
    column, row = m % W, m // W % H
    r, c = row[:, None] + (tap // 3 - 1)[None, :], column[:, None] + (tap % 3 - 1)[None, :]
    wanted = (m < positions)[:, None] & (k < 9 * C)[None, :]
    place = (m // (W * H) * (C * H * W))[:, None] + (channel * (H * W))[None, :] + r * W + c
    there = wanted & (r >= 0) & (r < H) & (c >= 0) & (c < W)
    value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    level = tl.load(centre + task * C + channel, mask=k < 9 * C, other=0.0)
    value = factor(tl.where(wanted, value - level[None, :], 0.0), ROUND).to(target.dtype.element_ty)
    tl.store(target + m[:, None] * K + k[None, :], value, mask=(m < positions)[:, None] & (k < K)[None, :])


@triton.jit
def moments_program(
    weight, covariance, mean, statistics, cw, stride, eps,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """statistics = mean(z) and 1/sqrt(var(z) + eps) [tasks, 2, C]; cw = covariance x weight."""
    wait()
    task = tl.program_id(0).to(tl.int64)
    k, out = tl.arange(0, BK), tl.arange(0, BN)
    inside = (k < K)[:, None] & (out < C)[None, :]
    w = tl.load(weight + task * stride * 16 + (k * C)[:, None] + out[None, :], mask=inside, other=0.0).to(tl.float32)
    square = tl.load(covariance + task * BK * BK + k[:, None] * BK + k[None, :])
    across = tl.dot(square, w, input_precision="ieee")
    variance = tl.maximum(tl.sum(w * across, 0), 0.0)
    row = statistics + task * 2 * C + out
    tl.store(row, tl.sum(w * tl.load(mean + task * BK + k)[:, None], 0), mask=out < C)
    tl.store(row + C, tl.rsqrt(variance + eps), mask=out < C)
    tl.store(cw + task * BK * BN + k[:, None] * BN + out[None, :], across)


@triton.jit
def cross_moments_program(
    weight, covariance, mean, statistics, cw, means, cv, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """means = mean(q) and mean(q y) for q = X v [tasks, 2, C]; cv = covariance x v."""
    wait()
    task = tl.program_id(0).to(tl.int64)
    k, out = tl.arange(0, BK), tl.arange(0, BN)
    inside = (k < K)[:, None] & (out < C)[None, :]
    v = tl.load(weight + task * stride * 16 + (k * C)[:, None] + out[None, :], mask=inside, other=0.0).to(tl.float32)
    square = tl.load(covariance + task * BK * BK + k[:, None] * BK + k[None, :])
    place = task * BK * BN + k[:, None] * BN + out[None, :]
    inverse = tl.load(statistics + task * 2 * C + C + out, mask=out < C, other=0.0)
    row = means + task * 2 * C + out
    tl.store(row, tl.sum(v * tl.load(mean + task * BK + k)[:, None], 0), mask=out < C)
    tl.store(row + C, inverse * tl.sum(v * tl.load(cw + place), 0), mask=out < C)
    tl.store(cv + place, tl.dot(square, v, input_precision="ieee"))


@triton.jit
def _corner(u, H, W):
    """Return the first position of each window."""
    across, down = W // 2, H // 2
    return u // (across * down) * (H * W) + u // across % down * (2 * W) + u % across * 2


@triton.jit
def _filters(weight, task, stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Load the filters of a task, [BK, BN]."""
    k, out = tl.arange(0, BK), tl.arange(0, BN)
    inside = (k < K)[:, None] & (out < C)[None, :]
    return tl.load(weight + task * stride * 16 + (k * C)[:, None] + out[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["windows", "positions", "H", "W", "stride"])
def forward_program(
    x, weight, statistics, gain, bias, target, peak, code, windows, positions, H, W, stride, slope,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr = False,
):  # fmt: skip
    """Convolve, normalise, pool and activate: `pool_program` of `pooled_norm.py` without a stored z."""
    wait()
    task = tl.program_id(1).to(tl.int64)
    k, channel = tl.arange(0, BK), tl.arange(0, BN)
    kept = channel < C
    w = _filters(weight, task, stride, K, C, BK, BN)
    mean = tl.load(statistics + task * 2 * C + channel, mask=kept, other=0.0)[None, :]
    inverse = tl.load(statistics + task * 2 * C + C + channel, mask=kept, other=0.0)[None, :]
    scale = tl.load(gain + channel, mask=kept, other=0.0)[None, :]
    shift = tl.load(bias + channel, mask=kept, other=0.0)[None, :]
    u = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (u < windows)[:, None] & kept[None, :]
    wanted = (u < windows)[:, None] & (k < K)[None, :]
    place = (task * positions + _corner(u, H, W))[:, None] * K + k[None, :]
    best = tl.zeros([BM, BN], tl.float32)
    best_y = tl.zeros([BM, BN], tl.float32)
    which = tl.zeros([BM, BN], tl.int32)
    for number in tl.static_range(4):
        patch = tl.load(x + place + (number // 2 * W + number % 2) * K, mask=wanted, other=0.0)
        y = (tl.dot(patch, w, input_precision=PRECISION) - mean) * inverse
        value = y * scale + shift
        if number == 0:
            best, best_y = value, y
        else:
            better = value > best
            best, best_y = tl.where(better, value, best), tl.where(better, y, best_y)
            which = tl.where(better, number, which)
    above = best > 0
    to = (task * windows + u)[:, None] * C + channel[None, :]
    out = factor(tl.where(above, best, best * slope), ROUND)
    tl.store(target + to, out.to(target.dtype.element_ty), mask=inside)
    tl.store(peak + to, best_y.to(peak.dtype.element_ty), mask=inside)
    tl.store(code + to, (which + tl.where(above, 4, 0)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["windows", "positions", "H", "W", "tiles"])
def correlate_program(
    x, gradient, code, parts, windows, positions, H, W, tiles, slope,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr = False,
):  # fmt: skip
    """parts [tasks, programs, K, C] = parts of X^T a."""
    wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    k, channel = tl.arange(0, BK), tl.arange(0, BN)
    total = tl.zeros([BK, BN], tl.float32)
    for tile in range(program, tiles, programs):
        u = tile * BM + tl.arange(0, BM)
        inside = (u < windows)[:, None] & (channel < C)[None, :]
        wanted = (u < windows)[:, None] & (k < K)[None, :]
        pooled = (task * windows + u)[:, None] * C + channel[None, :]
        codes = tl.load(code + pooled, mask=inside, other=0).to(tl.int32)
        a = through_activation(tl.load(gradient + pooled, mask=inside, other=0.0).to(tl.float32), codes, slope)
        a = factor(a, ROUND)
        place = (task * positions + _corner(u, H, W))[:, None] * K + k[None, :]
        for number in tl.static_range(4):
            patch = tl.load(x + place + (number // 2 * W + number % 2) * K, mask=wanted, other=0.0)
            taken = tl.where(codes % 4 == number, a, 0.0).to(patch.dtype)
            total = tl.dot(tl.trans(patch), taken, total, input_precision=PRECISION)
    to = (task * programs + program) * (K * C) + (k * C)[:, None] + channel[None, :]
    tl.store(parts + to, total, mask=(k < K)[:, None] & (channel < C)[None, :])


@triton.jit(do_not_specialize=["stride"])
def finish_program(
    target, mean, cw, statistics, gain, means_a, xa, cv, means_q, means_aq, means_c, count, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Turn X^T a in `target` into the gradient with respect to the filters; with SECOND into the outer gradient.

    These are the formulas of `scatter_program` in `pooled_norm.py`, multiplied by X^T. First order: also xa = X^T a.
    """
    wait()
    task = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BN)
    kept = channel < C
    place = k[:, None] * BN + channel[None, :]
    inside = (k < K)[:, None] & kept[None, :]
    to = target + task * stride * 16 + (k * C)[:, None] + channel[None, :]
    taken = tl.load(to, mask=inside, other=0.0)
    row = task * 2 * C + channel
    inverse = tl.load(statistics + row + C, mask=kept, other=0.0)[None, :]
    scale = tl.load(gain + channel, mask=kept, other=0.0)[None, :] * inverse
    mean_a = tl.load(means_a + row, mask=kept, other=0.0)[None, :]
    mean_ay = tl.load(means_a + row + C, mask=kept, other=0.0)[None, :]
    sum_x = tl.load(mean + task * BK + k)[:, None] * count
    here = task * BK * BN + place
    with_y = count * inverse * tl.load(cw + here)
    if SECOND:
        mean_qy = tl.load(means_q + row + C, mask=kept, other=0.0)[None, :]
        mean_apq = tl.load(means_aq + task * C + channel, mask=kept, other=0.0)[None, :]
        mean_c = tl.load(means_c + row, mask=kept, other=0.0)[None, :]
        mean_cy = tl.load(means_c + row + C, mask=kept, other=0.0)[None, :]
        with_a = tl.load(xa + here) - mean_a * sum_x - mean_ay * with_y
        with_p = count * tl.load(cv + here) - mean_qy * with_y
        value = taken - mean_c * sum_x - (mean_cy + mean_apq) * with_y
        value -= inverse * (mean_ay * with_p + mean_qy * with_a)
    else:
        tl.store(xa + here, taken)
        value = taken - mean_a * sum_x - mean_ay * with_y
    tl.store(to, scale * value, mask=inside)


@triton.jit(do_not_specialize=["windows", "positions", "H", "W", "tiles", "stride"])
def gather_program(
    x, weight, peak, code, gradient, statistics, gain, means_q, means_a, target, parts, counter, result,
    windows, positions, H, W, tiles, stride, slope,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr = False,
):  # fmt: skip
    """`gather_program` of `pooled_norm.py`, which here also computes q = X v."""
    wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    k, channel = tl.arange(0, BK), tl.arange(0, BN)
    kept = channel < C
    v = _filters(weight, task, stride, K, C, BK, BN)
    row = task * 2 * C + channel
    inverse = tl.load(statistics + row + C, mask=kept, other=0.0)
    scale = tl.load(gain + channel, mask=kept, other=0.0)
    mean_q = tl.load(means_q + row, mask=kept, other=0.0)
    mean_qy = tl.load(means_q + row + C, mask=kept, other=0.0)
    sums = tl.zeros([BN], tl.float32)
    for tile in range(program, tiles, programs):
        u = tile * BM + tl.arange(0, BM)
        inside = (u < windows)[:, None] & kept[None, :]
        wanted = (u < windows)[:, None] & (k < K)[None, :]
        pooled = (task * windows + u)[:, None] * C + channel[None, :]
        codes = tl.load(code + pooled, mask=inside, other=0).to(tl.int32)
        y = tl.load(peak + pooled, mask=inside, other=0.0).to(tl.float32)
        a = through_activation(tl.load(gradient + pooled, mask=inside, other=0.0).to(tl.float32), codes, slope)
        place = (task * positions + _corner(u, H, W))[:, None] * K + k[None, :]
        value = tl.zeros([BM, BN], tl.float32)
        for number in tl.static_range(4):
            patch = tl.load(x + place + (number // 2 * W + number % 2) * K, mask=wanted, other=0.0)
            value = tl.where(codes % 4 == number, tl.dot(patch, v, input_precision=PRECISION), value)
        p = inverse[None, :] * (value - mean_q[None, :] - y * mean_qy[None, :])
        signal = factor(through_activation(scale[None, :] * p, codes, slope), ROUND)
        tl.store(target + pooled, signal.to(target.dtype.element_ty), mask=inside)
        sums += tl.sum(tl.where(inside, a * value, 0.0), 0)
    tl.store(parts + (task * programs + program) * BN + channel, sums)
    if last_to_arrive(counter + task, programs):
        sums = sum_of_parts(parts + task * programs * BN, programs, BN, PARTS)
        mean_a = tl.load(means_a + row, mask=kept, other=0.0)
        mean_ay = tl.load(means_a + row + C, mask=kept, other=0.0)
        tl.store(
            result + task * C + channel, inverse * (sums / positions - mean_q * mean_a - mean_qy * mean_ay), mask=kept
        )


class Patches(NamedTuple):
    """The images as 3x3 patches, with mean and covariance of the patches."""

    x: Tensor  # [tasks, n, H, W, K]; K = 9 * channels, padded to a multiple of 16
    mean: Tensor  # [tasks, BK]
    covariance: Tensor  # [tasks, BK, BK]
    kept: Kept | None = None  # what comes into the head, from one inner step to the next

    def afresh(self) -> Patches:
        """The same images, of which every inner step computes all."""
        return self._replace(kept=None)

    @property
    def positions(self) -> int:
        return self.x[0].numel() // self.x.shape[-1]


def patches(x: Tensor, precision: Precision) -> Patches:  # [tasks, n, C, H, W]
    """Return the images as patches, in the type of the activations."""
    tasks, n, channels, height, width = x.shape
    x = x.contiguous()
    size = -(-9 * channels // 16) * 16
    block = triton.next_power_of_2(size)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    target = x.new_empty(tasks, n, height, width, size, dtype=kind)
    positions = n * height * width
    centre = x[:, 0].float().mean((-2, -1))
    patches_program[(-(-positions // PATCHES.positions), tasks)](
        x, centre, target, positions, height, width,
        C=channels, K=size, BK=block, BM=PATCHES.positions, ROUND=ROUNDED[precision], num_warps=PATCHES.warps,
        **OVERLAPPED,
    )  # fmt: skip
    count, chunk = convolution.splits(tasks, positions, size, precision, x.device)
    squares = x.new_empty(tasks, count, size, size, dtype=torch.float32)
    sums = x.new_empty(tasks, count, size, dtype=torch.float32)
    convolution.correlate([(target, target)], 1, precision, squares, (count, chunk), sums)
    mean, square = sums.sum(1) / positions, squares.sum(1) / positions
    covariance = torch.addcmul(square, mean[:, :, None], mean[:, None, :], value=-1)
    if more := block - size:
        mean, covariance = F.pad(mean, (0, more)), F.pad(covariance, (0, more, 0, more))
    return Patches(target, mean, covariance)


class Moments(NamedTuple):
    """Sums over z = X w, or over q = X v."""

    statistics: Tensor  # [tasks, 2, C]: mean(z) and 1/sqrt(var(z) + eps), or mean(q) and mean(q y)
    product: Tensor  # [tasks, BK, BN]: cw or cv


def _sizes(patches: Patches, weight: Tensor) -> dict[str, int]:
    rows, channels = weight.shape[1:]
    return {"K": rows, "C": channels, "BK": patches.mean.shape[-1], "BN": padded_channels(channels)}


def moments(patches: Patches, weight: Tensor, eps: float) -> Moments:
    """Return the moments of z = X w."""
    sizes, tasks = _sizes(patches, weight), len(weight)
    statistics = patches.mean.new_empty(tasks, 2, sizes["C"])
    product = patches.mean.new_empty(tasks, sizes["BK"], sizes["BN"])
    moments_program[(tasks,)](
        weight, patches.covariance, patches.mean, statistics, product, sixteens(weight), eps,
        **sizes, **OVERLAPPED,
    )  # fmt: skip
    return Moments(statistics, product)


def cross_moments(patches: Patches, weight: Tensor, own: Moments) -> Moments:
    """Return the moments of q = X v, where v is `weight`."""
    sizes = _sizes(patches, weight)
    means, product = torch.empty_like(own.statistics), torch.empty_like(own.product)
    cross_moments_program[(len(weight),)](
        weight, patches.covariance, patches.mean, own.statistics, own.product, means, product, sixteens(weight),
        **sizes, **OVERLAPPED,
    )  # fmt: skip
    return Moments(means, product)


def forward(
    patches: Patches, weight: Tensor, own: Moments, gain: Tensor, bias: Tensor, slope: float, precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:  # [tasks, n, H/2, W/2, C] each
    """Return the block's output, the peaks and the codes."""
    tasks, n, height, width, _ = patches.x.shape
    target = patches.x.new_empty(tasks, n, height // 2, width // 2, weight.shape[-1])
    peak, code = torch.empty_like(target), torch.empty_like(target, dtype=torch.uint8)
    windows = n * (height // 2) * (width // 2)
    forward_program[(-(-windows // TILE.positions), tasks)](
        patches.x, weight, own.statistics, gain, bias, target, peak, code, windows, patches.positions, height, width,
        sixteens(weight), slope, **_sizes(patches, weight), BM=TILE.positions, PRECISION=DOT[precision],
        ROUND=ROUNDED[precision], num_warps=TILE.warps, **OVERLAPPED,
    )  # fmt: skip
    return target, peak, code


def parts(patches: Patches) -> int:
    """Return the number of parts in which `correlate` sums."""
    _, n, height, width, _ = patches.x.shape
    return programs_for(patches.x, -(-n * (height // 2) * (width // 2) // TILE.positions), each=2)


def correlate(
    patches: Patches, gradient: Tensor, code: Tensor, slope: float, precision: Precision, target: Tensor
) -> None:
    """Write parts of X^T a, [tasks, parts, K, C]."""
    tasks, _, height, width, size = patches.x.shape
    channels = gradient.shape[-1]
    windows = gradient[0].numel() // channels
    correlate_program[(parts(patches), tasks)](
        patches.x, gradient, code, target, windows, patches.positions, height, width, -(-windows // TILE.positions),
        slope,
        K=size, C=channels, BK=patches.mean.shape[-1], BN=padded_channels(channels), BM=TILE.positions,
        PRECISION=DOT[precision], ROUND=ROUNDED[precision], num_warps=TILE.warps, **OVERLAPPED,
    )  # fmt: skip


class SecondOrder(NamedTuple):
    """What the outer gradient with respect to the filters needs in addition to the first order."""

    xa: Tensor  # X^T a
    cross: Moments  # of q = X v
    means_aq: Tensor  # mean(a P(q))
    means_later: Tensor  # mean(a) and mean(a y) of the outer gradient with respect to the block's output


def finish(
    target: Tensor,  # [tasks, K, C]: X^T a; overwritten with the gradient with respect to the filters
    patches: Patches,
    own: Moments,
    gain: Tensor,
    means_a: Tensor,
    second: SecondOrder | None = None,
) -> Tensor:  # [tasks, BK, BN]
    """Turn X^T a into the gradient with respect to the filters, in place. Returns X^T a."""
    sizes = _sizes(patches, target)
    more = second or SecondOrder(torch.empty_like(own.product), own, means_a, means_a)
    rows = 16
    finish_program[(sizes["BK"] // rows, len(target))](
        target, patches.mean, own.product, own.statistics, gain, means_a, more.xa, more.cross.product,
        more.cross.statistics, more.means_aq, more.means_later, float(patches.positions), sixteens(target),
        **sizes, ROWS=rows, SECOND=second is not None, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return more.xa


def gather(
    patches: Patches, weight: Tensor, peak: Tensor, code: Tensor, gradient: Tensor, own: Moments, gain: Tensor,
    cross: Moments, means_a: Tensor, slope: float, precision: Precision,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as `pooled_norm.gather`, for q = X v, where v is `weight`."""
    tasks, _, height, width, _ = patches.x.shape
    sizes = _sizes(patches, weight)
    windows = peak[0].numel() // sizes["C"]
    tiles = -(-windows // TILE.positions)
    programs = programs_for(peak, tiles, each=3)
    target = torch.empty_like(peak)
    parts = own.product.new_empty(tasks, programs, sizes["BN"])
    result = own.product.new_empty(tasks, sizes["C"])
    gather_program[(programs, tasks)](
        patches.x, weight, peak, code, gradient, own.statistics, gain, cross.statistics, means_a, target, parts,
        counters(peak.device), result, windows, patches.positions, height, width, tiles,
        sixteens(weight), slope, **sizes, BM=TILE.positions, PARTS=parts_at_a_time(programs),
        PRECISION=DOT[precision], ROUND=ROUNDED[precision], num_warps=TILE.warps, **OVERLAPPED,
    )  # fmt: skip
    return target, result
