# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""The linear head and the cross-entropy after it, in float32, with their derivatives.

The weights of the head are [tasks, ways, features]. There are few ways, so no matrix units are used.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.conv4.triton.device import INTERPRETED, OVERLAPPED, Pair, sixteens, wait

EXAMPLES = 128  # of a task, in one program of the cross-entropy


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
def scores_program(
    features_a, weight_a, features_b, weight_b, bias, target, n, stride_a, stride_b, stride_bias,
    SIZE: tl.constexpr, WAYS: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """target [tasks, n, ways] = features_a weight_a^T (+ features_b weight_b^T) + bias."""
    wait()
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
def features_gradient_program(
    g_a, weight_a, g_b, weight_b, target, n, stride_a, stride_b,
    SIZE: tl.constexpr, WAYS: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """target [tasks, n, features] = g_a weight_a (+ g_b weight_b)."""
    wait()
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
def weights_gradient_program(
    features_a, g_a, features_b, g_b, target, bias, n,
    SIZE: tl.constexpr, WAYS: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """target [tasks, ways, features] = g_a^T features_a (+ g_b^T features_b); bias [tasks, ways] = sum(g_a)."""
    wait()
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


def scores(pairs: list[Pair], bias: Tensor) -> Tensor:  # [tasks, n, ways]
    """Return features [tasks, n, F] x weights [tasks, ways, F], summed over the pairs, plus bias [tasks, 1, ways]."""
    (a, weight_a), (b, weight_b) = pairs[0], pairs[-1]
    tasks, n, size = a.shape
    ways = weight_a.shape[1]
    target = weight_a.new_empty(tasks, n, ways)
    block = triton.next_power_of_2(ways)
    examples = 16 if INTERPRETED else 2
    depth = max(32, min(4096 // (examples * block), triton.next_power_of_2(size)))
    scores_program[(-(-n // examples), tasks)](
        a, weight_a, b, weight_b, bias, target, n, sixteens(weight_a), sixteens(weight_b), sixteens(bias),
        SIZE=size, WAYS=ways, BW=block, BF=depth, BM=examples, PAIRS=len(pairs), num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return target


def features_gradient(pairs: list[Pair], kind: torch.dtype) -> Tensor:  # [tasks, n, F]
    """Return gradients of scores [tasks, n, ways] times weights [tasks, ways, F], summed over the pairs."""
    (g_a, weight_a), (g_b, weight_b) = pairs[0], pairs[-1]
    tasks, n, ways = g_a.shape
    size = weight_a.shape[-1]
    target = g_a.new_empty(tasks, n, size, dtype=kind)
    features_gradient_program[(-(-n // 8), -(-size // 256), tasks)](
        g_a, weight_a, g_b, weight_b, target, n, sixteens(weight_a), sixteens(weight_b),
        SIZE=size, WAYS=ways, BF=256, BM=8, PAIRS=len(pairs), num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return target


def weights_gradient(pairs: list[Pair], target: Tensor, bias_target: Tensor) -> None:
    """Write the gradients with respect to weights [tasks, ways, F] and bias [tasks, ways].

    A pair is features and gradients of scores.
    """
    (a, g_a), (b, g_b) = pairs[0], pairs[-1]
    tasks, n, size = a.shape
    ways = g_a.shape[-1]
    block = triton.next_power_of_2(ways)
    width = 512 if INTERPRETED else 64
    examples = max(2, 64 // block)
    weights_gradient_program[(-(-size // width), tasks)](
        a, g_a, b, g_b, target, bias_target, n,
        SIZE=size, WAYS=ways, BW=block, BF=width, BM=examples, PAIRS=len(pairs), num_warps=4, **OVERLAPPED,
    )  # fmt: skip


@triton.jit
def _probabilities(logits, targets, task, i, n, ways, BW: tl.constexpr):
    """Return logits of examples i, log of the sum of their exponentials, probabilities, and the right way."""
    way = tl.arange(0, BW)
    inside = (i < n)[:, None] & (way < ways)[None, :]
    x = tl.load(logits + (task * n + i)[:, None] * ways + way[None, :], mask=inside, other=float("-inf"))
    x = tl.where((i < n)[:, None], x, 0.0)
    largest = tl.max(x, 1)[:, None]
    powers = tl.where((way < ways)[None, :], tl.exp(x - largest), 0.0)
    total = tl.sum(powers, 1)[:, None]
    target = tl.load(targets + task * n + i, mask=i < n, other=-1)
    right = (way[None, :] == target[:, None]) & (way < ways)[None, :]
    return x, largest + tl.log(total), powers / total, right


@triton.jit
def cross_entropy_program(logits, targets, losses, n, ways, BM: tl.constexpr, BW: tl.constexpr):
    """losses [tasks] = the mean loss of each task, one program for a task."""
    wait()
    task = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, n, BM):
        i = start + tl.arange(0, BM)
        x, top, _, right = _probabilities(logits, targets, task, i, n, ways, BW)
        total += tl.sum(tl.where(right, top - x, 0.0))
        known = tl.sum(right.to(tl.int32), 1) > 0
        total += tl.sum(tl.where((i < n) & ~known, float("nan"), 0.0))  # a label that is not a class
    tl.store(losses + task, total / n)


@triton.jit
def cross_entropy_gradient_program(g, logits, targets, target, n, ways, stride, BM: tl.constexpr, BW: tl.constexpr):
    """target = g (p - right) / n."""
    wait()
    task = tl.program_id(1).to(tl.int64)
    i, way = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BW)
    _, _, p, right = _probabilities(logits, targets, task, i, n, ways, BW)
    scale = tl.load(g + task * stride) / n
    value = scale * (p - tl.where(right, 1.0, 0.0))
    inside = (i < n)[:, None] & (way < ways)[None, :]
    tl.store(target + (task * n + i)[:, None] * ways + way[None, :], value, mask=inside)


@triton.jit
def cross_entropy_second_program(v, g, logits, targets, target, n, ways, stride, BM: tl.constexpr, BW: tl.constexpr):
    """target = g p (v - sum(p v)) / n."""
    wait()
    task = tl.program_id(1).to(tl.int64)
    i, way = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BW)
    _, _, p, _ = _probabilities(logits, targets, task, i, n, ways, BW)
    scale = tl.load(g + task * stride) / n
    inside = (i < n)[:, None] & (way < ways)[None, :]
    place = (task * n + i)[:, None] * ways + way[None, :]
    w = tl.load(v + place, mask=inside, other=0.0)
    value = scale * p * (w - tl.sum(p * w, 1)[:, None])
    tl.store(target + place, value, mask=inside)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:  # [tasks, n, ways], [tasks, n] -> [tasks]
    """Return the mean cross-entropy of each task; twice differentiable."""
    return _CrossEntropy.apply(logits.contiguous(), targets.contiguous())


def _sizes(logits: Tensor) -> dict[str, int]:
    return {"BM": EXAMPLES, "BW": triton.next_power_of_2(logits.shape[-1])}


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        losses = logits.new_empty(len(logits))
        cross_entropy_program[(len(logits),)](
            logits, targets, losses, *logits.shape[1:], **_sizes(logits), **OVERLAPPED
        )
        return losses

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _CrossEntropyGradient.apply(g, *ctx.saved_tensors), None


class _CrossEntropyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        target = torch.empty_like(logits)
        ctx.save_for_backward(g, logits, targets)
        tasks, n, ways = logits.shape
        cross_entropy_gradient_program[(-(-n // EXAMPLES), tasks)](
            g, logits, targets, target, n, ways, g.stride(0), **_sizes(logits), **OVERLAPPED
        )
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, logits, targets = ctx.saved_tensors
        target = torch.empty_like(logits)
        tasks, n, ways = logits.shape
        cross_entropy_second_program[(-(-n // EXAMPLES), tasks)](
            v.contiguous(), g, logits, targets, target, n, ways, g.stride(0), **_sizes(logits), **OVERLAPPED
        )
        to_g = None
        if ctx.needs_input_grad[0]:  # the gradient is linear in g: its derivative is its value at g = 1
            unit = torch.empty_like(logits)
            one = torch.ones_like(g)
            cross_entropy_gradient_program[(-(-n // EXAMPLES), tasks)](
                one, logits, targets, unit, n, ways, 1, **_sizes(logits), **OVERLAPPED
            )
            to_g = (v * unit).sum((1, 2))
        return to_g, target, None
