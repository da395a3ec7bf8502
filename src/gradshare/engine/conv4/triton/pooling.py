# mypy: ignore-errors
"""The GPU programs of batch norm, max pooling and leaky ReLU, and of their first and second derivative."""

from __future__ import annotations

import triton
import triton.language as tl

from gradshare.engine.conv4.triton.device import _through_activation, _wait
from gradshare.engine.conv4.triton.parts import _last_to_arrive, _store_means, _sum_of_parts


@triton.jit(do_not_specialize=["windows", "H", "W"])
def pool(
    z, statistics, gain, bias, target, peak, code, windows, H, W, slope,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Normalise, pool and activate; leave y at each window's largest element, and a code: which one, +4 if above 0."""
    _wait()
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
    tl.store(target + to, tl.where(above, best, best * slope).to(target.dtype.element_ty), mask=inside)
    tl.store(peak + to, best_y.to(peak.dtype.element_ty), mask=inside)
    tl.store(code + to, (which + tl.where(above, 4, 0)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["windows", "positions", "tiles"])
def pooled_means(
    gradient, peak, code, parts, counter, result, windows, positions, tiles, slope,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """result = mean(a) and mean(a y) over all positions, for the gradient a by the normalised activations."""
    _wait()
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
        a = _through_activation(a, tl.load(code + place, mask=inside, other=0), slope)
        first += tl.sum(a, 0)
        second += tl.sum(a * tl.load(peak + place, mask=inside, other=0.0).to(tl.float32), 0)
    mine = parts + (task * programs + program) * 2 * BN + channel
    tl.store(mine, first)
    tl.store(mine + BN, second)
    if _last_to_arrive(counter + task, programs):
        _store_means(parts + task * programs * 2 * BN, programs, positions, result + task * 2 * C, C, BN, PARTS)


@triton.jit(do_not_specialize=["windows", "H", "W", "tiles"])
def gather(
    q, peak, code, gradient, statistics, gain, means_q, means_a, target, parts, counter, result,
    windows, H, W, tiles, slope,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """target = gain P(q) at each window's largest element, through the activation; result = mean(a P(q)) [tasks, C]."""
    _wait()
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
        result_value = _through_activation(scale[None, :] * p, codes, slope)
        tl.store(target + pooled, result_value.to(target.dtype.element_ty), mask=inside)
        a = tl.load(gradient + pooled, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(tl.where(inside, _through_activation(a, codes, slope) * value, 0.0), 0)
    tl.store(parts + (task * programs + program) * BN + channel, sums)
    if _last_to_arrive(counter + task, programs):
        sums = _sum_of_parts(parts + task * programs * BN, programs, BN, PARTS)
        mean_a = tl.load(means_a + row, mask=kept, other=0.0)
        mean_ay = tl.load(means_a + row + C, mask=kept, other=0.0)
        mixed = inverse * (sums / (images * H * W) - mean_q * mean_a - mean_qy * mean_ay)
        tl.store(result + task * C + channel, mixed, mask=kept)


@triton.jit(do_not_specialize=["windows", "images", "H", "W"])
def spread(
    z, statistics, gain, code, gradient, means_a, q, means_q, means_aq, later, means_c, target,
    windows, images, H, W, slope,
    C: tl.constexpr, SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """target = the gradient by the convolution's output, at every position.

    First order: gain P(a), a being `gradient` through pooling and activation. With SECOND, the outer gradient: `later`
    taken the same way, plus what the inner gradient's own dependence on z adds (normalisation.py has the formula).
    """
    _wait()
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
    wide, high = (W + 1) // 2, (H + 1) // 2  # windows, those that pooling leaves out at odd edges included
    u = tl.program_id(0) * BM + tl.arange(0, BM)
    image, r, c = u // (wide * high), u // wide % high, u % wide
    inside = (u < windows)[:, None] & kept[None, :]
    whole = inside & ((r < down) & (c < across))[:, None]
    start = task * images
    pooled = (start * down * across + image * (down * across) + r * across + c)[:, None] * C + channel[None, :]
    codes = tl.load(code + pooled, mask=whole, other=0).to(tl.int32)
    which = codes % 4
    peak_a = tl.load(gradient + pooled, mask=whole, other=0.0).to(tl.float32)
    peak_a = _through_activation(peak_a, codes, slope)
    if SECOND:
        peak_c = tl.load(later + pooled, mask=whole, other=0.0).to(tl.float32)
        peak_c = _through_activation(peak_c, codes, slope)
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
        tl.store(target + place, (scale * value).to(target.dtype.element_ty), mask=there)
