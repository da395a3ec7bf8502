# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Batch norm, 2x2 max pooling and leaky ReLU as one function, with its first and second derivative.

The symbols are those of `engine/operations.py` and of `conv4/cpu/pooled_norm.py`: z is the result of the convolution,
y is z normalised, P the derivative of y, and a the gradient with respect to the normalised activations, which is zero
except at the largest element of each window. Pooling leaves two values for each window: the *peak*, y at the largest
element, and a *code*, the number of that element in the window (0 to 3), plus 4 where the output is above 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.conv4.triton.device import (
    INTERPRETED,
    OVERLAPPED,
    SMALL_BATCH_TILES,
    Tile,
    counters,
    factor,
    last_to_arrive,
    padded_channels,
    parts_at_a_time,
    programs_for,
    store_means,
    sum_of_parts,
    through_activation,
    wait,
)

ELEMENTWISE = Tile(positions=16 if SMALL_BATCH_TILES else 32, depth=0, warps=4, stages=0)
REDUCTION = Tile(positions=32, depth=0, warps=4, stages=0)


@triton.jit(do_not_specialize=["windows", "H", "W"])
def pool_program(
    z, statistics, gain, bias, target, peak, code, windows, H, W, slope,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROUND: tl.constexpr = False,
):  # fmt: skip
    """Normalise, pool and activate; also store peak and code of each window."""
    wait()
    task = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BN)
    kept = channel < C
    mean = tl.load(statistics + task * 2 * C + channel, mask=kept, other=0.0)[None, :]
    inverse = tl.load(statistics + task * 2 * C + C + channel, mask=kept, other=0.0)[None, :]
    scale = tl.load(gain + channel, mask=kept, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(bias + channel, mask=kept, other=0.0).to(tl.float32)[None, :]
    u = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (u < windows)[:, None] & kept[None, :]
    across, down = W // 2, H // 2
    corner = u // (across * down) * (H * W) + u // across % down * (2 * W) + u % across * 2
    z += task * (windows // (across * down)) * H * W * C
    place = corner[:, None] * C + channel[None, :]
    best_y = (tl.load(z + place, mask=inside, other=0.0).to(tl.float32) - mean) * inverse
    best = best_y * scale + shift
    which = tl.zeros([BM, BN], tl.int32)
    for corner_number in tl.static_range(1, 4):
        step = (corner_number // 2 * W + corner_number % 2) * C
        y = (tl.load(z + place + step, mask=inside, other=0.0).to(tl.float32) - mean) * inverse
        value = y * scale + shift
        better = value > best
        best, best_y = tl.where(better, value, best), tl.where(better, y, best_y)
        which = tl.where(better, corner_number, which)
    above = best > 0
    to = task * windows * C + u[:, None] * C + channel[None, :]
    out = factor(tl.where(above, best, best * slope), ROUND)
    tl.store(target + to, out.to(target.dtype.element_ty), mask=inside)
    tl.store(peak + to, best_y.to(peak.dtype.element_ty), mask=inside)
    tl.store(code + to, (which + tl.where(above, 4, 0)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["windows", "positions", "tiles"])
def pooled_means_program(
    gradient, peak, code, parts, counter, result, windows, positions, tiles, slope,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """result = mean(a) and mean(a y) over all positions [tasks, 2, C]."""
    wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BN)
    kept = channel < C
    first = tl.zeros([BN], tl.float32)
    second = tl.zeros([BN], tl.float32)
    for tile in range(program, tiles, programs):
        u = tile * BM + tl.arange(0, BM)
        inside = (u < windows)[:, None] & kept[None, :]
        place = task * windows * C + u[:, None] * C + channel[None, :]
        a = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        a = through_activation(a, tl.load(code + place, mask=inside, other=0), slope)
        first += tl.sum(a, 0)
        second += tl.sum(a * tl.load(peak + place, mask=inside, other=0.0).to(tl.float32), 0)
    mine = parts + (task * programs + program) * 2 * BN + channel
    tl.store(mine, first)
    tl.store(mine + BN, second)
    if last_to_arrive(counter + task, programs):
        store_means(parts + task * programs * 2 * BN, programs, positions, result + task * 2 * C, C, BN, PARTS)


@triton.jit(do_not_specialize=["windows", "H", "W", "tiles"])
def gather_program(
    q, peak, code, gradient, statistics, gain, means_q, means_a, target, parts, counter, result,
    windows, H, W, tiles, slope,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, ROUND: tl.constexpr = False,
):  # fmt: skip
    """target = gain P(q) at the largest elements, through the activation; result = mean(a P(q)) [tasks, C]."""
    wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BN)
    kept = channel < C
    row = task * 2 * C + channel
    inverse = tl.load(statistics + row + C, mask=kept, other=0.0)
    scale = tl.load(gain + channel, mask=kept, other=0.0).to(tl.float32)
    mean_q = tl.load(means_q + row, mask=kept, other=0.0)
    mean_qy = tl.load(means_q + row + C, mask=kept, other=0.0)
    across, down = W // 2, H // 2
    images = windows // (across * down)
    q += task * images * H * W * C
    sums = tl.zeros([BN], tl.float32)
    for tile in range(program, tiles, programs):
        u = tile * BM + tl.arange(0, BM)
        inside = (u < windows)[:, None] & kept[None, :]
        pooled = task * windows * C + u[:, None] * C + channel[None, :]
        codes = tl.load(code + pooled, mask=inside, other=0).to(tl.int32)
        which = codes % 4
        corner = u // (across * down) * (H * W) + u // across % down * (2 * W) + u % across * 2
        place = (corner[:, None] + which // 2 * W + which % 2) * C + channel[None, :]
        value = tl.load(q + place, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(peak + pooled, mask=inside, other=0.0).to(tl.float32)
        p = inverse[None, :] * (value - mean_q[None, :] - y * mean_qy[None, :])
        result_value = factor(through_activation(scale[None, :] * p, codes, slope), ROUND)
        tl.store(target + pooled, result_value.to(target.dtype.element_ty), mask=inside)
        a = tl.load(gradient + pooled, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(tl.where(inside, through_activation(a, codes, slope) * value, 0.0), 0)
    tl.store(parts + (task * programs + program) * BN + channel, sums)
    if last_to_arrive(counter + task, programs):
        sums = sum_of_parts(parts + task * programs * BN, programs, BN, PARTS)
        mean_a = tl.load(means_a + row, mask=kept, other=0.0)
        mean_ay = tl.load(means_a + row + C, mask=kept, other=0.0)
        mixed = inverse * (sums / (images * H * W) - mean_q * mean_a - mean_qy * mean_ay)
        tl.store(result + task * C + channel, mixed, mask=kept)


@triton.jit(do_not_specialize=["windows", "images", "H", "W"])
def scatter_program(
    z, statistics, gain, code, gradient, means_a, q, means_q, means_aq, later, means_c, target,
    windows, images, H, W, slope,
    C: tl.constexpr, SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROUND: tl.constexpr = False,
):  # fmt: skip
    """target = the gradient with respect to z, at every position.

    First order: gain P(a), where a is `gradient` taken back through activation and pooling. With SECOND the outer
    gradient: `later` taken back in the same way, plus the term of the inner gradient's dependence on z.
    """
    wait()
    task = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BN)
    kept = channel < C
    row = task * 2 * C + channel
    mean = tl.load(statistics + row, mask=kept, other=0.0)[None, :]
    inverse = tl.load(statistics + row + C, mask=kept, other=0.0)[None, :]
    scale = tl.load(gain + channel, mask=kept, other=0.0).to(tl.float32)[None, :] * inverse
    mean_a = tl.load(means_a + row, mask=kept, other=0.0)[None, :]
    mean_ay = tl.load(means_a + row + C, mask=kept, other=0.0)[None, :]
    if SECOND:
        mean_q = tl.load(means_q + row, mask=kept, other=0.0)[None, :]
        mean_qy = tl.load(means_q + row + C, mask=kept, other=0.0)[None, :]
        mean_apq = tl.load(means_aq + task * C + channel, mask=kept, other=0.0)[None, :]
        mean_c = tl.load(means_c + row, mask=kept, other=0.0)[None, :]
        mean_cy = tl.load(means_c + row + C, mask=kept, other=0.0)[None, :]
    across, down = W // 2, H // 2
    wide, high = (W + 1) // 2, (H + 1) // 2  # windows, also those at odd edges, which pooling leaves out
    u = tl.program_id(0) * BM + tl.arange(0, BM)
    image, r, c = u // (wide * high), u // wide % high, u % wide
    inside = (u < windows)[:, None] & kept[None, :]
    whole = inside & ((r < down) & (c < across))[:, None]
    start = task * images
    pooled = (start * down * across + image * (down * across) + r * across + c)[:, None] * C + channel[None, :]
    codes = tl.load(code + pooled, mask=whole, other=0).to(tl.int32)
    which = codes % 4
    peak_a = tl.load(gradient + pooled, mask=whole, other=0.0).to(tl.float32)
    peak_a = through_activation(peak_a, codes, slope)
    if SECOND:
        peak_c = tl.load(later + pooled, mask=whole, other=0.0).to(tl.float32)
        peak_c = through_activation(peak_c, codes, slope)
    corner = (start * H * W + image * (H * W) + r * (2 * W) + c * 2)[:, None] * C + channel[None, :]
    for number in tl.static_range(4):
        there = inside & ((r * 2 + number // 2 < H) & (c * 2 + number % 2 < W))[:, None]
        place = corner + (number // 2 * W + number % 2) * C
        y = (tl.load(z + place, mask=there, other=0.0).to(tl.float32) - mean) * inverse
        a = tl.where(which == number, peak_a, 0.0) - mean_a - y * mean_ay
        if SECOND:
            p = tl.load(q + place, mask=there, other=0.0).to(tl.float32) - mean_q - y * mean_qy
            value = tl.where(which == number, peak_c, 0.0) - mean_c - y * (mean_cy + mean_apq)
            value -= inverse * (p * mean_ay + a * mean_qy)
        else:
            value = a
        tl.store(target + place, factor(scale * value, ROUND).to(target.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tasks", "positions_0", "positions_1", "positions_2", "positions_3"])
def norms_gradient_program(
    means_0, means_1, means_2, means_3, more_0, more_1, more_2, more_3, target,
    positions_0, positions_1, positions_2, positions_3, tasks,
    C: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """target [4, 2, C] = sum(a y) for the gain and sum(a) for the bias, over all tasks and positions of each block.

    means: of a and a y, [tasks, 2, C]. With MORE, `more` [tasks, C] is added to mean(a y): it comes from the first
    derivative, which depends on the gain.
    """
    wait()
    block = tl.program_id(0)
    if block == 0:
        means, more, positions = means_0, more_0, positions_0
    elif block == 1:
        means, more, positions = means_1, more_1, positions_1
    elif block == 2:
        means, more, positions = means_2, more_2, positions_2
    else:
        means, more, positions = means_3, more_3, positions_3
    channel = tl.arange(0, BN)
    kept = channel < C
    to_gain = tl.zeros([BN], tl.float32)
    to_bias = tl.zeros([BN], tl.float32)
    for start in range(0, tasks, BT):
        task = start + tl.arange(0, BT)
        there = (task < tasks)[:, None] & kept[None, :]
        place = task[:, None] * (2 * C) + channel[None, :]
        to_bias += tl.sum(tl.load(means + place, mask=there, other=0.0), 0)
        to_gain += tl.sum(tl.load(means + place + C, mask=there, other=0.0), 0)
        if MORE:
            to_gain += tl.sum(tl.load(more + task[:, None] * C + channel[None, :], mask=there, other=0.0), 0)
    tl.store(target + block * 2 * C + channel, to_gain * positions, mask=kept)
    tl.store(target + block * 2 * C + C + channel, to_bias * positions, mask=kept)


def pool(
    z: Tensor, statistics: Tensor, gain: Tensor, bias: Tensor, slope: float, rounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # [tasks, n, H/2, W/2, C] each
    """Return the block's output, to TF32 if `rounded`, the peaks and the codes."""
    tasks, n, height, width, channels = z.shape
    target = z.new_empty(tasks, n, height // 2, width // 2, channels)
    peak, code = torch.empty_like(target), torch.empty_like(target, dtype=torch.uint8)
    windows = n * (height // 2) * (width // 2)
    grid, sizes = _elementwise(tasks, windows, channels)
    pool_program[grid](
        z, statistics, gain, bias, target, peak, code, windows, height, width, slope, C=channels,
        ROUND=rounded, **sizes, **OVERLAPPED,
    )  # fmt: skip
    return target, peak, code


def _elementwise(tasks: int, windows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block = 64 if INTERPRETED else ELEMENTWISE.positions
    return (-(-windows // block), tasks), {"BM": block, "BN": padded_channels(channels), "num_warps": ELEMENTWISE.warps}


def _reduction(x: Tensor, windows: int, channels: int) -> tuple[tuple[int, int], int, Tensor, dict[str, int]]:
    """Return grid, tiles, a buffer for the parts, and sizes."""
    block = 64 if INTERPRETED else REDUCTION.positions
    tiles = -(-windows // block)
    programs = programs_for(x, tiles, each=4)
    parts = x.new_empty(len(x), programs, 2, padded_channels(channels), dtype=torch.float32)
    sizes = {
        "BM": block,
        "BN": padded_channels(channels),
        "PARTS": parts_at_a_time(programs),
        "num_warps": REDUCTION.warps,
    }
    return (programs, len(x)), tiles, parts, sizes


def pooled_means(gradient: Tensor, peak: Tensor, code: Tensor, positions: int, slope: float) -> Tensor:
    """Return mean(a) and mean(a y), [tasks, 2, C]."""
    tasks, channels = len(gradient), gradient.shape[-1]
    windows = gradient[0].numel() // channels
    grid, tiles, parts, sizes = _reduction(gradient, windows, channels)
    result = gradient.new_empty(tasks, 2, channels, dtype=torch.float32)
    pooled_means_program[grid](
        gradient, peak, code, parts, counters(gradient.device), result, windows, positions, tiles, slope,
        C=channels, **sizes, **OVERLAPPED,
    )  # fmt: skip
    return result


def gather(
    q: Tensor, peak: Tensor, code: Tensor, gradient: Tensor, statistics: Tensor, gain: Tensor, means_q: Tensor,
    means_a: Tensor, slope: float, rounded: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return gain P(q) at the largest element of each window, through the activation, and mean(a P(q)) [tasks, C]."""
    tasks, _, height, width, channels = q.shape
    windows = peak[0].numel() // channels
    grid, tiles, parts, sizes = _reduction(q, windows, channels)
    target = torch.empty_like(peak)
    result = q.new_empty(tasks, channels, dtype=torch.float32)
    gather_program[grid](
        q, peak, code, gradient, statistics, gain, means_q, means_a, target, parts, counters(q.device), result,
        windows, height, width, tiles, slope, C=channels, ROUND=rounded, **sizes, **OVERLAPPED,
    )  # fmt: skip
    return target, result


class SecondOrder(NamedTuple):
    """What the outer gradient with respect to z needs in addition to the first order."""

    q: Tensor  # what comes back to the gradient with respect to z
    means_q: Tensor  # mean(q) and mean(q y)
    means_aq: Tensor  # mean(a P(q))
    later: Tensor  # the outer gradient with respect to the block's output
    means_later: Tensor  # its mean(a) and mean(a y)


def scatter(
    z: Tensor, statistics: Tensor, gain: Tensor, code: Tensor, gradient: Tensor, means: Tensor, slope: float,
    second: SecondOrder | None = None, rounded: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient with respect to z, [tasks, n, H, W, C]; with `second` the outer one."""
    tasks, n, height, width, channels = z.shape
    target = torch.empty_like(z)
    windows = n * ((height + 1) // 2) * ((width + 1) // 2)
    more = second or SecondOrder(z, means, means, gradient, means)
    grid, sizes = _elementwise(tasks, windows, channels)
    scatter_program[grid](
        z, statistics, gain, code, gradient, means, more.q, more.means_q, more.means_aq, more.later, more.means_later,
        target, windows, n, height, width, slope, C=channels, SECOND=second is not None, ROUND=rounded,
        **sizes, **OVERLAPPED,
    )  # fmt: skip
    return target


def norms_gradient(means: list[Tensor], more: list[Tensor] | None, positions: list[int]) -> Tensor:  # [blocks, 2, C]
    """Return the gradient with respect to gains and biases of all blocks, from `means` and `more` of each block."""
    tasks, _, channels = means[0].shape
    target = means[0].new_empty(len(means), 2, channels)
    norms_gradient_program[(len(means),)](
        *means, *(more or means), target, *positions, tasks,
        C=channels, BN=padded_channels(channels), BT=parts_at_a_time(tasks), MORE=more is not None, **OVERLAPPED,
    )  # fmt: skip
    return target
