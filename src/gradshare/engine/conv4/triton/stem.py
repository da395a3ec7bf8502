# mypy: ignore-errors
"""The GPU programs of the first block, whose images never change.

Batch norm's sums over z = X w, X the patches of a task's images, follow from X's mean and covariance C alone:

    mean(z) = mean(X) w        var(z) = w^T C w        mean(q y) = v^T C w / s   for q = X v        X^T y = N C w / s

So the block runs in one pass, without storing z, and its gradients by w are sums over the pooled elements (X^T a, for
the gradient a by the elements that pooling took) and terms in C. What else is needed is made again from X.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradshare.engine.conv4.triton.device import _through_activation, _wait
from gradshare.engine.conv4.triton.parts import _last_to_arrive, _sum_of_parts


@triton.jit(do_not_specialize=["positions", "H", "W"])
def patches(x, centre, target, positions, H, W, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr):
    """3x3 patches of images [tasks, n, C, H, W], less `centre` [tasks, C].

    A constant that is taken from all pixels, the zeros around the image included, changes nothing after batch norm, and
    keeps the covariance accurate.
    """
    _wait()
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
    value = tl.where(wanted, value - level[None, :], 0.0).to(target.dtype.element_ty)
    tl.store(target + m[:, None] * K + k[None, :], value, mask=(m < positions)[:, None] & (k < K)[None, :])


@triton.jit
def moments(
    weight, covariance, mean, statistics, spread, stride, eps,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """statistics = mean(z) and 1/sqrt(var(z) + eps) [tasks, 2, C]; spread = covariance x weight [tasks, BK, BN]."""
    _wait()
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
    tl.store(spread + task * BK * BN + k[:, None] * BN + out[None, :], across)


@triton.jit
def cross_moments(
    weight, covariance, mean, statistics, spread, means, spread_v, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """means = mean(q) and mean(q y) for q = X v [tasks, 2, C]; spread_v = covariance x v [tasks, BK, BN]."""
    _wait()
    task = tl.program_id(0).to(tl.int64)
    k, out = tl.arange(0, BK), tl.arange(0, BN)
    inside = (k < K)[:, None] & (out < C)[None, :]
    v = tl.load(weight + task * stride * 16 + (k * C)[:, None] + out[None, :], mask=inside, other=0.0).to(tl.float32)
    square = tl.load(covariance + task * BK * BK + k[:, None] * BK + k[None, :])
    place = task * BK * BN + k[:, None] * BN + out[None, :]
    inverse = tl.load(statistics + task * 2 * C + C + out, mask=out < C, other=0.0)
    row = means + task * 2 * C + out
    tl.store(row, tl.sum(v * tl.load(mean + task * BK + k)[:, None], 0), mask=out < C)
    tl.store(row + C, inverse * tl.sum(v * tl.load(spread + place), 0), mask=out < C)
    tl.store(spread_v + place, tl.dot(square, v, input_precision="ieee"))


@triton.jit
def _corner(u, H, W):
    """The first position of each window."""
    across, down = W // 2, H // 2
    return u // (across * down) * (H * W) + u // across % down * (2 * W) + u % across * 2


@triton.jit
def _filters(weight, task, stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    k, out = tl.arange(0, BK), tl.arange(0, BN)
    inside = (k < K)[:, None] & (out < C)[None, :]
    return tl.load(weight + task * stride * 16 + (k * C)[:, None] + out[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["windows", "positions", "H", "W", "stride"])
def forward(
    x, weight, statistics, gain, bias, target, peak, code, windows, positions, H, W, stride, slope,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolve, normalise, pool and activate: `device.pool` without its z."""
    _wait()
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
    tl.store(target + to, tl.where(above, best, best * slope).to(target.dtype.element_ty), mask=inside)
    tl.store(peak + to, best_y.to(peak.dtype.element_ty), mask=inside)
    tl.store(code + to, (which + tl.where(above, 4, 0)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["windows", "positions", "H", "W", "tiles"])
def correlate(
    x, gradient, code, parts, windows, positions, H, W, tiles, slope,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of X^T a [tasks, programs, K, C], a being the gradient through pooling and activation."""
    _wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    k, channel = tl.arange(0, BK), tl.arange(0, BN)
    total = tl.zeros([BK, BN], tl.float32)
    for tile in range(program, tiles, programs):
        u = tile * BM + tl.arange(0, BM)
        inside = (u < windows)[:, None] & (channel < C)[None, :]
        wanted = (u < windows)[:, None] & (k < K)[None, :]
        pooled = (task * windows + u)[:, None] * C + channel[None, :]
        codes = tl.load(code + pooled, mask=inside, other=0).to(tl.int32)
        a = _through_activation(tl.load(gradient + pooled, mask=inside, other=0.0).to(tl.float32), codes, slope)
        place = (task * positions + _corner(u, H, W))[:, None] * K + k[None, :]
        for number in tl.static_range(4):
            patch = tl.load(x + place + (number // 2 * W + number % 2) * K, mask=wanted, other=0.0)
            taken = tl.where(codes % 4 == number, a, 0.0).to(patch.dtype)
            total = tl.dot(tl.trans(patch), taken, total, input_precision=PRECISION)
    to = (task * programs + program) * (K * C) + (k * C)[:, None] + channel[None, :]
    tl.store(parts + to, total, mask=(k < K)[:, None] & (channel < C)[None, :])


@triton.jit(do_not_specialize=["stride"])
def finish(
    target, mean, spread, statistics, gain, means_a, sparse_a, spread_v, means_q, means_aq, means_c, count, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """target = the gradient by the filters, from X^T a in the same place and the moments; with SECOND the outer one.

    The formulas of `device.spread`, multiplied by X^T. First order: also leaves X^T a in `sparse_a`.
    """
    _wait()
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
    with_y = count * inverse * tl.load(spread + here)
    if SECOND:
        mean_qy = tl.load(means_q + row + C, mask=kept, other=0.0)[None, :]
        mean_apq = tl.load(means_aq + task * C + channel, mask=kept, other=0.0)[None, :]
        mean_c = tl.load(means_c + row, mask=kept, other=0.0)[None, :]
        mean_cy = tl.load(means_c + row + C, mask=kept, other=0.0)[None, :]
        with_a = tl.load(sparse_a + here) - mean_a * sum_x - mean_ay * with_y
        with_p = count * tl.load(spread_v + here) - mean_qy * with_y
        value = taken - mean_c * sum_x - (mean_cy + mean_apq) * with_y
        value -= inverse * (mean_ay * with_p + mean_qy * with_a)
    else:
        tl.store(sparse_a + here, taken)
        value = taken - mean_a * sum_x - mean_ay * with_y
    tl.store(to, scale * value, mask=inside)


@triton.jit(do_not_specialize=["windows", "positions", "H", "W", "tiles", "stride"])
def gather(
    x, weight, peak, code, gradient, statistics, gain, means_q, means_a, target, parts, counter, result,
    windows, positions, H, W, tiles, stride, slope,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`device.gather` with q = X v made here."""
    _wait()
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
        a = _through_activation(tl.load(gradient + pooled, mask=inside, other=0.0).to(tl.float32), codes, slope)
        place = (task * positions + _corner(u, H, W))[:, None] * K + k[None, :]
        value = tl.zeros([BM, BN], tl.float32)
        for number in tl.static_range(4):
            patch = tl.load(x + place + (number // 2 * W + number % 2) * K, mask=wanted, other=0.0)
            value = tl.where(codes % 4 == number, tl.dot(patch, v, input_precision=PRECISION), value)
        p = inverse[None, :] * (value - mean_q[None, :] - y * mean_qy[None, :])
        signal = _through_activation(scale[None, :] * p, codes, slope)
        tl.store(target + pooled, signal.to(target.dtype.element_ty), mask=inside)
        sums += tl.sum(tl.where(inside, a * value, 0.0), 0)
    tl.store(parts + (task * programs + program) * BN + channel, sums)
    if _last_to_arrive(counter + task, programs):
        sums = _sum_of_parts(parts + task * programs * BN, programs, BN, PARTS)
        mean_a = tl.load(means_a + row, mask=kept, other=0.0)
        mean_ay = tl.load(means_a + row + C, mask=kept, other=0.0)
        tl.store(
            result + task * C + channel, inverse * (sums / positions - mean_q * mean_a - mean_qy * mean_ay), mask=kept
        )
