# mypy: ignore-errors
"""The GPU programs for what is small but frequent: the loss, and gradient sharing over all weights as one vector."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradshare.engine.conv4.triton.device import _wait
from gradshare.engine.conv4.triton.parts import _last_to_arrive

IGNORED = tl.constexpr(-100)  # a label that F.cross_entropy leaves out
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _probabilities(logits, targets, task, i, n, ways, BW: tl.constexpr):
    """Logits, log of the sum of their exponentials, probabilities, and which way is right, of examples i."""
    way = tl.arange(0, BW)
    inside = (i < n)[:, None] & (way < ways)[None, :]
    x = tl.load(logits + (task * n + i)[:, None] * ways + way[None, :], mask=inside, other=float("-inf"))
    x = tl.where((i < n)[:, None], x, 0.0)
    largest = tl.max(x, 1)[:, None]
    powers = tl.where((way < ways)[None, :], tl.exp(x - largest), 0.0)
    total = tl.sum(powers, 1)[:, None]
    target = tl.load(targets + task * n + i, mask=i < n, other=IGNORED)
    right = (way[None, :] == target[:, None]) & (way < ways)[None, :]
    return x, largest + tl.log(total), powers / total, right, target != IGNORED


@triton.jit
def _judged(targets, task, n, BM: tl.constexpr):
    """How many examples are not to be ignored."""
    count = 0
    for start in range(0, n, BM):
        i = start + tl.arange(0, BM)
        count += tl.sum((tl.load(targets + task * n + i, mask=i < n, other=IGNORED) != IGNORED).to(tl.int32))
    return count


@triton.jit
def cross_entropy(logits, targets, losses, n, ways, BM: tl.constexpr, BW: tl.constexpr):
    """The mean loss of every task, one program each."""
    _wait()
    task = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, n, BM):
        i = start + tl.arange(0, BM)
        x, top, _, right, judged = _probabilities(logits, targets, task, i, n, ways, BW)
        total += tl.sum(tl.where(right & judged[:, None], top - x, 0.0))
        known = tl.sum(right.to(tl.int32), 1) > 0
        total += tl.sum(tl.where(judged & ~known, float("nan"), 0.0))  # there is no such class
    tl.store(losses + task, total / _judged(targets, task, n, BM))


@triton.jit
def cross_entropy_gradient(g, logits, targets, target, n, ways, stride, BM: tl.constexpr, BW: tl.constexpr):
    """target = g (p - right) / n."""
    _wait()
    task = tl.program_id(1).to(tl.int64)
    i, way = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BW)
    _, _, p, right, judged = _probabilities(logits, targets, task, i, n, ways, BW)
    scale = tl.load(g + task * stride) / _judged(targets, task, n, BM)
    value = tl.where(judged[:, None], scale * (p - tl.where(right, 1.0, 0.0)), 0.0)
    inside = (i < n)[:, None] & (way < ways)[None, :]
    tl.store(target + (task * n + i)[:, None] * ways + way[None, :], value, mask=inside)


@triton.jit
def cross_entropy_second(v, g, logits, targets, target, n, ways, stride, BM: tl.constexpr, BW: tl.constexpr):
    """target = g p (v - sum(p v)) / n."""
    _wait()
    task = tl.program_id(1).to(tl.int64)
    i, way = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BW)
    _, _, p, _, judged = _probabilities(logits, targets, task, i, n, ways, BW)
    scale = tl.load(g + task * stride) / _judged(targets, task, n, BM)
    inside = (i < n)[:, None] & (way < ways)[None, :]
    place = (task * n + i)[:, None] * ways + way[None, :]
    w = tl.load(v + place, mask=inside, other=0.0)
    value = tl.where(judged[:, None], scale * p * (w - tl.sum(p * w, 1)[:, None]), 0.0)
    tl.store(target + place, value, mask=inside)


@triton.jit(do_not_specialize=["tasks", "positions_0", "positions_1", "positions_2", "positions_3"])
def to_norms(
    means_0, means_1, means_2, means_3, more_0, more_1, more_2, more_3, target,
    positions_0, positions_1, positions_2, positions_3, tasks,
    C: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """target [4, 2, C] = sum(a y), to the gain, and sum(a), to the bias, over all tasks and positions of each block.

    means: of a and a y, [tasks, 2, C]. MORE: what comes to sum(a y) through the first derivative, a mean, [tasks, C].
    """
    _wait()
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


@triton.jit
def sum_of_tasks(gradients, total, parts, counter, inverse, tasks, size, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """total = the sum over tasks [size]; inverse = 1 / its length, or 0 where that is 0. Squares are float64.

    An element that is not finite does not count, and a sum too large becomes the largest number.
    """
    _wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    element = program * BLOCK + tl.arange(0, BLOCK)
    there = element < size
    value = tl.zeros([BLOCK], tl.float32)
    for task in range(tasks):
        own = tl.load(gradients + task * size + element, mask=there, other=0.0)
        value += tl.where(tl.abs(own) < float("inf"), own, 0.0)
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(total + element, value, mask=there)
    wide = value.to(tl.float64)
    tl.store(parts + program, tl.sum(wide * wide, 0))
    if _last_to_arrive(counter, programs):
        part = tl.arange(0, PARTS)
        squares = tl.sum(tl.load(parts + part, mask=part < programs, other=0.0, cache_modifier=".cg"), 0)
        length = tl.sqrt(tl.where(squares == 0, 1.0, squares))
        tl.store(inverse, tl.where(squares == 0, 0.0, 1.0 / length))  # in float64: it may be larger than a float32


@triton.jit
def share(
    gradients, total, inverse, stored, seen, m, lam, running, direction, tasks, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Equations 2 to 4."""
    _wait()
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = element < size
    keep, gate = 1 / (1 + tl.exp(-tl.load(m))), 1 / (1 + tl.exp(-tl.load(lam)))
    fresh = (tl.load(total + element, mask=there, other=0.0) * tl.load(inverse)).to(tl.float32)
    if tl.load(seen) != 0:  # noqa: SIM108
        mean = keep * fresh + (1 - keep) * tl.load(stored + element, mask=there, other=0.0)
    else:
        mean = fresh
    tl.store(running + element, mean, mask=there)
    for task in range(tasks):
        own = tl.load(gradients + task * size + element, mask=there, other=0.0)
        tl.store(direction + task * size + element, gate * mean + (1 - gate) * own, mask=there)


@triton.jit
def share_sums(
    v, gradients, total, inverse, stored, seen, running, m, lam, together, parts, counter, results, steps, step,
    tasks, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """together = sum over tasks of v; results = <g, together>, then the gradients by m and by lam, [1 + 2 steps]."""
    _wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    element = program * BLOCK + tl.arange(0, BLOCK)
    there = element < size
    mean = tl.load(running + element, mask=there, other=0.0)
    total_v = tl.zeros([BLOCK], tl.float32)
    by_gate = tl.zeros([BLOCK], tl.float32)
    for task in range(tasks):
        w = tl.load(v + task * size + element, mask=there, other=0.0)
        total_v += w
        by_gate += w * (mean - tl.load(gradients + task * size + element, mask=there, other=0.0))
    tl.store(together + element, total_v, mask=there)
    fresh = (tl.load(total + element, mask=there, other=0.0) * tl.load(inverse)).to(tl.float32)
    by_keep = total_v * (fresh - tl.load(stored + element, mask=there, other=0.0))
    tl.store(parts + program * 3, tl.sum(total_v * fresh, 0))
    tl.store(parts + program * 3 + 1, tl.sum(by_keep, 0))
    tl.store(parts + program * 3 + 2, tl.sum(by_gate, 0))
    if _last_to_arrive(counter, programs):
        part = tl.arange(0, PARTS)
        ok = part < programs
        along = tl.sum(tl.load(parts + part * 3, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        to_keep = tl.sum(tl.load(parts + part * 3 + 1, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        to_gate = tl.sum(tl.load(parts + part * 3 + 2, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        keep, gate = 1 / (1 + tl.exp(-tl.load(m))), 1 / (1 + tl.exp(-tl.load(lam)))
        to_m = tl.where(tl.load(seen) != 0, gate * to_keep * keep * (1 - keep), 0.0)
        tl.store(results, along)
        at = tl.arange(0, STEPS)
        tl.store(results + 1 + at, tl.where(at == step, to_m, 0.0), mask=at < steps)
        tl.store(results + 1 + steps + at, tl.where(at == step, to_gate * gate * (1 - gate), 0.0), mask=at < steps)


@triton.jit
def share_gradient(
    v, gradients, together, total, inverse, seen, m, lam, results, target, tasks, size, BLOCK: tl.constexpr
):  # fmt: skip
    """target = the gradient by every task's gradient; what did not count in the sum has none through it."""
    _wait()
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = element < size
    keep, gate = 1 / (1 + tl.exp(-tl.load(m))), 1 / (1 + tl.exp(-tl.load(lam)))
    factor = tl.load(inverse)
    weight = gate * tl.where(tl.load(seen) != 0, keep, 1.0) * factor
    fresh = (tl.load(total + element, mask=there, other=0.0) * factor).to(tl.float32)
    common = (weight * (tl.load(together + element, mask=there, other=0.0) - fresh * tl.load(results))).to(tl.float32)
    for task in range(tasks):
        w = tl.load(v + task * size + element, mask=there, other=0.0)
        counted = tl.abs(tl.load(gradients + task * size + element, mask=there, other=0.0)) < float("inf")
        tl.store(target + task * size + element, (1 - gate) * w + tl.where(counted, common, 0.0), mask=there)
