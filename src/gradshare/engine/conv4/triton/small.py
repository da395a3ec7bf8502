# mypy: ignore-errors
"""The GPU programs of gradient sharing, where all weights of a task are one vector."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradshare.engine.conv4.triton.device import last_to_arrive, wait

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def sum_of_tasks(gradients, total, parts, counter, inverse, tasks, size, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """total = the sum over tasks [size]; inverse = 1 / its length, or 0 where that is 0. Squares are float64.

    An element that is not finite does not count, and a sum too large becomes the largest number.
    """
    wait()
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
    if last_to_arrive(counter, programs):
        part = tl.arange(0, PARTS)
        squares = tl.sum(tl.load(parts + part, mask=part < programs, other=0.0, cache_modifier=".cg"), 0)
        length = tl.sqrt(tl.where(squares == 0, 1.0, squares))
        tl.store(inverse, tl.where(squares == 0, 0.0, 1.0 / length))  # in float64: it may be larger than a float32


@triton.jit
def share(
    gradients, total, inverse, stored, seen, m, lam, running, direction, tasks, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Equations 2 to 4."""
    wait()
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
    wait()
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
    if last_to_arrive(counter, programs):
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
    wait()
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
