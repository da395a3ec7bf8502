# mypy: ignore-errors
"""The GPU programs of the block convolution - batch norm - max pool - leaky ReLU, in Triton.

Activations are [tasks, images, height, width, channels]; a "position" is one (image, row, column) of a task, a "window"
the 2x2 positions that pooling takes together. Weights are [tasks, taps * inputs, outputs] in the type of the
activations, with any multiple of 16 elements between tasks. Sums, statistics and accumulators are float32 whatever the
activations are.

Where the GPU can, a program is launched while the one before it is still running, and begins by waiting for its end.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from gradshare.engine.conv4.triton.parts import _last_to_arrive, _parts, _store_means

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, for tests; its bfloat16 is not to be trusted


def _all_overlap() -> bool:
    """Whether every GPU here can launch a program before the one before it has ended: Hopper and later.

    Triton knows how to ask for that since 3.4 or so; 3.6 and later were tried.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        return False
    gpus = range(0 if INTERPRETED or torch.version.cuda is None else torch.cuda.device_count())
    return len(gpus) > 0 and all(torch.cuda.get_device_capability(gpu) >= (9, 0) for gpu in gpus)


OVERLAPS = tl.constexpr(_all_overlap())
OVERLAPPED = {"launch_pdl": True} if OVERLAPS.value else {}  # for the launch of every program


@triton.jit
def _wait():
    """The first line of every program: what earlier ones wrote is there, and what they read may be overwritten."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _through_activation(gradient, code, slope):
    """A gradient by the block's output as one by the largest element of each window."""
    return tl.where(code >= 4, gradient, gradient * slope)


@triton.jit
def _taps(k, SOURCE: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr):
    """Row and column offset, and channel, of each row k of a filter matrix."""
    channel = k % SOURCE
    tap = k // SOURCE
    if TAPS == 1:
        down, right = tap * 0, tap * 0
    elif FLIP:
        down, right = 1 - tap // 3, 1 - tap % 3
    else:
        down, right = tap // 3 - 1, tap % 3 - 1
    return down, right, channel


@triton.jit
def _patches(source, m, row, column, k, positions, H, W, SOURCE: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr):
    """The k-th values of the patches around positions m: [positions, k]; zero outside the image."""
    down, right, channel = _taps(k, SOURCE, TAPS, FLIP)
    there = (m < positions)[:, None] & (k < TAPS * SOURCE)[None, :]
    if TAPS > 1:
        r, c = row[:, None] + down[None, :], column[:, None] + right[None, :]
        there = there & (r >= 0) & (r < H) & (c >= 0) & (c < W)
    place = m[:, None] * SOURCE + ((down * W + right) * SOURCE + channel)[None, :]
    return tl.load(source + place, mask=there, other=0.0)


@triton.jit
def _multiply(
    total, source, weight, m, row, column, positions, H, W,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add patches x filters to `total` [positions, targets]."""
    out = tl.arange(0, BN)
    for k0 in range(0, TAPS * SOURCE, BK):
        k = k0 + tl.arange(0, BK)
        patch = _patches(source, m, row, column, k, positions, H, W, SOURCE, TAPS, FLIP)
        if FLIP:  # [taps, targets, sources]
            place = (out * SOURCE)[:, None] + (k // SOURCE * TARGET * SOURCE + k % SOURCE)[None, :]
            there = (out < TARGET)[:, None] & (k < TAPS * SOURCE)[None, :]
            filters = tl.trans(tl.load(weight + place, mask=there, other=0.0))
        else:  # [taps, sources, targets]
            place = (k * TARGET)[:, None] + out[None, :]
            there = (k < TAPS * SOURCE)[:, None] & (out < TARGET)[None, :]
            filters = tl.load(weight + place, mask=there, other=0.0)
        total = tl.dot(patch, filters, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["positions", "H", "W", "stride_a", "stride_b", "tiles", "count"])
def convolve(
    source_a, weight_a, source_b, weight_b, target, z, statistics, code, parts, counter, result,
    positions, H, W, stride_a, stride_b, tiles, count, eps, slope,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr, PAIRS: tl.constexpr,
    SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """target = convolution of a (plus that of b), or with FLIP its adjoint.

    SUMS "moments": result = mean and 1/sqrt(var + eps) of every channel of the target [tasks, 2, channels].
    SUMS "means": result = mean(q) and mean(q y) for the target q and the normalised y of `z`.
    SUMS "pooled": the target is a gradient by a pooled block's output, with peak `z` and `code`; result = mean(a) and
    mean(a y) over the `count` positions before pooling, for the gradient a by the normalised activations.
    """
    _wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    out = tl.arange(0, BN)
    kept = out < TARGET
    source_a += task * positions * SOURCE
    source_b += task * positions * SOURCE
    weight_a += task * stride_a * 16
    weight_b += task * stride_b * 16
    target += task * positions * TARGET
    z += task * positions * TARGET
    if SUMS == "means":
        mean = tl.load(statistics + task * 2 * TARGET + out, mask=kept, other=0.0)
        inverse = tl.load(statistics + task * 2 * TARGET + TARGET + out, mask=kept, other=0.0)
    first = tl.zeros([BN], tl.float32)
    second = tl.zeros([BN], tl.float32)
    counted = 0.0
    for tile in range(program, tiles, programs):
        m = tile * BM + tl.arange(0, BM)
        column, row = m % W, m // W % H
        inside = (m < positions)[:, None] & kept[None, :]
        place = m[:, None] * TARGET + out[None, :]
        if SUMS == "means" or SUMS == "pooled":  # asked for early, so that they are there when the product is
            other = tl.load(z + place, mask=inside, other=0.0)
        if SUMS == "pooled":
            codes = tl.load(code + task * positions * TARGET + place, mask=inside, other=0)
        total = tl.zeros([BM, BN], tl.float32)
        total = _multiply(
            total, source_a, weight_a, m, row, column, positions, H, W, SOURCE, TARGET, TAPS, FLIP, BN, BK, PRECISION
        )
        if PAIRS == 2:
            total = _multiply(
                total, source_b, weight_b, m, row, column, positions, H, W, SOURCE, TARGET, TAPS, FLIP, BN, BK,
                PRECISION,
            )  # fmt: skip
        rounded = total.to(target.dtype.element_ty)
        tl.store(target + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
        if SUMS == "moments":  # by Chan's rule: squares of differences alone, so that a large mean costs no digits
            here = tl.minimum(BM, positions - tile * BM).to(tl.float32)
            tile_mean = tl.sum(value, 0) / here
            away = tl.where(inside, value - tile_mean[None, :], 0.0)
            shift = tile_mean - first
            together = counted + here
            second += tl.sum(away * away, 0) + shift * shift * (counted * here / together)
            first += shift * (here / together)
            counted = together
        elif SUMS == "means":
            y = (other.to(tl.float32) - mean[None, :]) * inverse[None, :]
            first += tl.sum(value, 0)
            second += tl.sum(tl.where(inside, value * y, 0.0), 0)
        elif SUMS == "pooled":
            a = _through_activation(value, codes, slope)
            first += tl.sum(a, 0)
            second += tl.sum(a * other.to(tl.float32), 0)
    if SUMS != "none":
        mine = parts + (task * programs + program) * 2 * BN + out
        tl.store(mine, first)
        tl.store(mine + BN, second)
        if _last_to_arrive(counter + task, programs):
            parts += task * programs * 2 * BN
            if SUMS == "moments":
                near = tl.load(parts + out, cache_modifier=".cg")  # the first program's mean: differences from there
                top = tl.zeros([BN], tl.float32)
                bottom = tl.zeros([BN], tl.float32)
                for start in range(0, programs, PARTS):
                    means, weight = _parts(parts, start, programs, tiles, positions, BM, BN, PARTS)
                    squares, _ = _parts(parts + BN, start, programs, tiles, positions, BM, BN, PARTS)
                    away = means - near[None, :]
                    top += tl.sum(away * weight, 0)
                    bottom += tl.sum(squares + away * away * weight, 0)
                top /= positions
                variance = tl.maximum(bottom / positions - top * top, 0.0)
                tl.store(result + task * 2 * TARGET + out, near + top, mask=kept)
                tl.store(result + task * 2 * TARGET + TARGET + out, tl.rsqrt(variance + eps), mask=kept)
            else:
                _store_means(parts, programs, count, result + task * 2 * TARGET, TARGET, BN, PARTS)


@triton.jit
def _multiply_transposed(total, a, b, PRECISION: tl.constexpr):
    """total + a^T b. In "tf32", float32 as the sum of two bfloat16: the GPU cannot transpose TF32 on its way."""
    if a.dtype == tl.float32 and PRECISION == "tf32":
        high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        low_a, low_b = (a - high_a.to(tl.float32)).to(tl.bfloat16), (b - high_b.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(tl.trans(high_a), high_b, total)
        total = tl.dot(tl.trans(high_a), low_b, total)
        return tl.dot(tl.trans(low_a), high_b, total)
    return tl.dot(tl.trans(a), b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["positions", "H", "W", "chunk"])
def correlate(
    source_a, gradient_a, source_b, gradient_b, parts, bias_parts, positions, H, W, chunk,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TAPS: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient by the filters: patches^T x gradients, summed over a chunk of positions.

    parts: [tasks, chunks, taps * sources, targets]. BIAS: also the first gradients' sum, [tasks, chunks, targets].
    """
    _wait()
    k = tl.program_id(0) * BR + tl.arange(0, BR)
    split, splits, task = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    out = tl.arange(0, BN)
    source_a += task * positions * SOURCE
    source_b += task * positions * SOURCE
    gradient_a += task * positions * TARGET
    gradient_b += task * positions * TARGET
    total = tl.zeros([BR, BN], tl.float32)
    bias = tl.zeros([BN], tl.float32)
    end = tl.minimum(positions, (split + 1) * chunk)
    for start in range(split * chunk, end, BP):
        m = start + tl.arange(0, BP)
        column, row = m % W, m // W % H
        place = m[:, None] * TARGET + out[None, :]
        inside = (m < end)[:, None] & (out < TARGET)[None, :]
        patch = _patches(source_a, m, row, column, k, end, H, W, SOURCE, TAPS, False)
        value = tl.load(gradient_a + place, mask=inside, other=0.0)
        total = _multiply_transposed(total, patch, value, PRECISION)
        if BIAS:
            bias += tl.sum(value.to(tl.float32), 0)
        if PAIRS == 2:
            patch = _patches(source_b, m, row, column, k, end, H, W, SOURCE, TAPS, False)
            value = tl.load(gradient_b + place, mask=inside, other=0.0)
            total = _multiply_transposed(total, patch, value, PRECISION)
    there = (k < TAPS * SOURCE)[:, None] & (out < TARGET)[None, :]
    to = (task * splits + split) * (TAPS * SOURCE * TARGET) + (k * TARGET)[:, None] + out[None, :]
    tl.store(parts + to, total, mask=there)
    if BIAS:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(bias_parts + (task * splits + split) * TARGET + out, bias, mask=out < TARGET)


@triton.jit(do_not_specialize=["size"])
def add_parts(parts, table, target, size, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """target [tasks, size] = sums of parts. Each program has a row of `table`: where its first part starts, how many
    there are and their size, where the sum goes, and how many of its elements are wanted; the others are zero."""
    _wait()
    row, task = table + tl.program_id(0) * 6, tl.program_id(1).to(tl.int64)
    start, count, stride = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    to, wanted, filled = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    element = tl.arange(0, BLOCK)
    parts += start + task * count * stride
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, MOST):
        part = first + tl.arange(0, MOST)
        there = (part < count)[:, None] & (element < wanted)[None, :]
        total += tl.sum(tl.load(parts + part[:, None] * stride + element[None, :], mask=there, other=0.0), 0)
    tl.store(target + task * size + to + element, total, mask=element < filled)
