# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Gradient sharing (equations 1 to 4) for all weights of a task as one vector of P elements, with its derivative.

m and lam are the learned values of one inner step; keep = sig(m) and gate = sig(lam). An element of a gradient that is
not finite does not count in the sum over tasks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.conv4.triton.device import INTERPRETED, OVERLAPPED, counters, last_to_arrive, wait

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
ELEMENTS = 1024 if not INTERPRETED else 1 << 14  # of the vector, in one program


@triton.jit
def sum_of_tasks_program(
    gradients, total, parts, counter, inverse, tasks, size, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """total [size] = the sum over tasks; inverse = 1 / its length, or 0 where the length is 0. Squares are float64.

    A sum that is too large for float32 becomes the largest float32.
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
        tl.store(inverse, tl.where(squares == 0, 0.0, 1.0 / length))  # float64: it can be too large for float32


@triton.jit
def share_program(
    gradients, total, inverse, stored, seen, m, lam, running, direction, tasks, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Equations 2 to 4: running [size] and direction [tasks, size]."""
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
def share_sums_program(
    v, gradients, total, inverse, stored, seen, running, m, lam, together, parts, counter, results, steps, step,
    tasks, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """together = the sum of v over tasks; results [1 + 2 steps] = <g, together> and the gradients of m and of lam."""
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
def share_gradient_program(
    v, gradients, together, total, inverse, seen, m, lam, results, target, tasks, size, BLOCK: tl.constexpr
):  # fmt: skip
    """target [tasks, size] = the gradient with respect to every task's gradient."""
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


def share(
    gradients: Tensor,  # [tasks, P]
    m: Tensor,  # [steps]
    lam: Tensor,  # [steps]
    stored: Tensor,  # [P]: running mean of earlier meta-iterations, at this step
    seen: Tensor,  # []
    step: int,
) -> tuple[Tensor, Tensor]:  # [tasks, P], [P]
    """Equations 1 to 4: return every task's direction and the running mean."""
    return _Share.apply(gradients.contiguous(), m, lam, stored, seen, step)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradients: Tensor, m: Tensor, lam: Tensor, stored: Tensor, seen: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        tasks, size = gradients.shape
        programs = -(-size // ELEMENTS)
        total, running = gradients.new_empty(size), gradients.new_empty(size)
        inverse = gradients.new_empty((), dtype=torch.float64)
        direction = torch.empty_like(gradients)
        parts = gradients.new_empty(programs, dtype=torch.float64)
        sum_of_tasks_program[(programs,)](
            gradients, total, parts, counters(gradients.device), inverse, tasks, size,
            BLOCK=ELEMENTS, PARTS=triton.next_power_of_2(programs), **OVERLAPPED,
        )  # fmt: skip
        share_program[(programs,)](
            gradients, total, inverse, stored, seen, m[step:], lam[step:], running, direction, tasks, size,
            BLOCK=ELEMENTS, **OVERLAPPED,
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # else PyTorch would allocate a gradient of zeros for the running mean
        ctx.save_for_backward(gradients, m, lam, stored, seen, total, inverse, running)
        ctx.step = step
        ctx.mark_non_differentiable(running)
        return direction, running

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if v is None:
            return (None,) * 6
        gradients, m, lam, stored, seen, total, inverse, running = ctx.saved_tensors
        tasks, size = gradients.shape
        step, steps, v = ctx.step, len(m), v.contiguous()
        programs = -(-size // ELEMENTS)
        together, target = gradients.new_empty(size), torch.empty_like(gradients)
        parts, results = gradients.new_empty(programs, 3), gradients.new_empty(1 + 2 * steps)
        share_sums_program[(programs,)](
            v, gradients, total, inverse, stored, seen, running, m[step:], lam[step:], together, parts,
            counters(gradients.device), results, steps, step, tasks, size,
            BLOCK=ELEMENTS, PARTS=triton.next_power_of_2(programs), STEPS=triton.next_power_of_2(steps), **OVERLAPPED,
        )  # fmt: skip
        share_gradient_program[(programs,)](
            v, gradients, together, total, inverse, seen, m[step:], lam[step:], results, target, tasks, size,
            BLOCK=ELEMENTS, **OVERLAPPED,
        )  # fmt: skip
        return target, results[1 : 1 + steps], results[1 + steps :], None, None, None


def cosines(vectors: Tensor, direction: Tensor) -> Tensor:  # [tasks, P], [P] -> [tasks]
    """Return the cosine between every task's vector and a direction; 0, with zero derivative, where either is zero."""
    return _Cosines.apply(vectors, direction)


class _Cosines(torch.autograd.Function):
    """Lengths are float64. Elements that are not finite are replaced as in `method.sharing.normalised`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, direction: Tensor) -> Tensor:
        finite = vectors.nan_to_num()
        inverse = _inverse_length(finite)
        units = (finite * inverse).to(vectors.dtype)
        unit = (direction * _inverse_length(direction)).to(vectors.dtype)
        result = (units * unit).sum(1, keepdim=True)
        ctx.save_for_backward(units, unit, inverse, result)
        return result.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        units, unit, inverse, result = ctx.saved_tensors
        return (v[:, None] * inverse).to(v.dtype) * (unit - result * units), None


def _inverse_length(vectors: Tensor) -> Tensor:  # [..., P] -> [..., 1]
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return torch.where(length == 0, 0.0, 1 / length)
