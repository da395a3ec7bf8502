# mypy: ignore-errors
"""The GPU programs of the linear head, in float32. Its weights are [tasks, ways, features]; there are few ways."""

from __future__ import annotations

import triton
import triton.language as tl

from gradshare.engine.conv4.triton.device import _wait


@triton.jit
def _scores(total, features, weight, i, n, SIZE: tl.constexpr, WAYS: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr):
    """Add features x weights to `total` [examples, ways, BF], still to be summed over its last axis."""
    way = tl.arange(0, BW)
    for start in range(0, SIZE, BF):
        f = start + tl.arange(0, BF)
        inside = (i < n)[:, None] & (f < SIZE)[None, :]
        x = tl.load(features + i[:, None] * SIZE + f[None, :], mask=inside, other=0.0).to(tl.float32)
        inside = (way < WAYS)[:, None] & (f < SIZE)[None, :]
        w = tl.load(weight + way[:, None] * SIZE + f[None, :], mask=inside, other=0.0)
        total += x[:, None, :] * w[None, :, :]
    return total


@triton.jit(do_not_specialize=["n", "stride_a", "stride_b", "stride_bias"])
def scores(
    features_a, weight_a, features_b, weight_b, bias, target, n, stride_a, stride_b, stride_bias,
    SIZE: tl.constexpr, WAYS: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """target [tasks, n, ways] = features_a weight_a^T (+ features_b weight_b^T) + bias."""
    _wait()
    task = tl.program_id(1).to(tl.int64)
    i, way = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BW)
    total = tl.zeros([BM, BW, BF], tl.float32)
    total = _scores(total, features_a + task * n * SIZE, weight_a + task * stride_a * 16, i, n, SIZE, WAYS, BW, BF)
    if PAIRS == 2:
        total = _scores(total, features_b + task * n * SIZE, weight_b + task * stride_b * 16, i, n, SIZE, WAYS, BW, BF)
    value = tl.sum(total, 2) + tl.load(bias + task * stride_bias * 16 + way, mask=way < WAYS, other=0.0)[None, :]
    inside = (i < n)[:, None] & (way < WAYS)[None, :]
    tl.store(target + (task * n + i)[:, None] * WAYS + way[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["n", "stride_a", "stride_b"])
def towards_features(
    g_a, weight_a, g_b, weight_b, target, n, stride_a, stride_b,
    SIZE: tl.constexpr, WAYS: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """target [tasks, n, features] = g_a weight_a (+ g_b weight_b)."""
    _wait()
    task = tl.program_id(2).to(tl.int64)
    i, f = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BF + tl.arange(0, BF)
    total = tl.zeros([BM, BF], tl.float32)
    for way in range(WAYS):
        g = tl.load(g_a + (task * n + i) * WAYS + way, mask=i < n, other=0.0)
        w = tl.load(weight_a + task * stride_a * 16 + way * SIZE + f, mask=f < SIZE, other=0.0)
        total += g[:, None] * w[None, :]
        if PAIRS == 2:
            g = tl.load(g_b + (task * n + i) * WAYS + way, mask=i < n, other=0.0)
            w = tl.load(weight_b + task * stride_b * 16 + way * SIZE + f, mask=f < SIZE, other=0.0)
            total += g[:, None] * w[None, :]
    inside = (i < n)[:, None] & (f < SIZE)[None, :]
    to = (task * n + i)[:, None] * SIZE + f[None, :]
    tl.store(target + to, total.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def towards_weights(
    features_a, g_a, features_b, g_b, target, bias, n,
    SIZE: tl.constexpr, WAYS: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """target [tasks, ways, features] = g_a^T features_a (+ g_b^T features_b); bias [tasks, ways] = sum(g_a)."""
    _wait()
    task = tl.program_id(1).to(tl.int64)
    f, way = tl.program_id(0) * BF + tl.arange(0, BF), tl.arange(0, BW)
    total = tl.zeros([BW, BF], tl.float32)
    to_bias = tl.zeros([BW], tl.float32)
    for start in range(0, n, BM):
        i = start + tl.arange(0, BM)
        examples = (i < n)[:, None] & (f < SIZE)[None, :]
        scored = (i < n)[:, None] & (way < WAYS)[None, :]
        place, at = (task * n + i)[:, None] * SIZE + f[None, :], (task * n + i)[:, None] * WAYS + way[None, :]
        g = tl.load(g_a + at, mask=scored, other=0.0)
        x = tl.load(features_a + place, mask=examples, other=0.0).to(tl.float32)
        total += tl.sum(g[:, :, None] * x[:, None, :], 0)
        to_bias += tl.sum(g, 0)
        if PAIRS == 2:
            g = tl.load(g_b + at, mask=scored, other=0.0)
            x = tl.load(features_b + place, mask=examples, other=0.0).to(tl.float32)
            total += tl.sum(g[:, :, None] * x[:, None, :], 0)
    inside = (way < WAYS)[:, None] & (f < SIZE)[None, :]
    tl.store(target + task * WAYS * SIZE + way[:, None] * SIZE + f[None, :], total, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(bias + task * WAYS + way, to_bias, mask=way < WAYS)
