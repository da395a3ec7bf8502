"""Gradient sharing as single functions with their own derivatives, by the programs of `small.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.conv4.triton import small
from gradshare.engine.conv4.triton.device import INTERPRETED, OVERLAPPED, counters

ELEMENTS = 1024 if not INTERPRETED else 1 << 14


def share(
    gradients: Tensor,  # [tasks, P]
    m: Tensor,  # [steps]
    lam: Tensor,  # [steps]
    stored: Tensor,  # [P]: the running mean of earlier meta-iterations, at this step
    seen: Tensor,  # []
    step: int,
) -> tuple[Tensor, Tensor]:  # [tasks, P], [P]
    """Equations 1 to 4: every task's direction, and the running mean."""
    return _Share.apply(gradients.contiguous(), m, lam, stored, seen, step)


def cosines(vectors: Tensor, direction: Tensor) -> Tensor:  # [tasks, P], [P] -> [tasks]
    """The cosine between every task's vector and a direction; 0, with zero derivative, where either is zero."""
    return _Cosines.apply(vectors, direction)


class _Cosines(torch.autograd.Function):
    """Lengths in float64; what is not finite counts as in `sharing.normalised`."""

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
        most = triton.next_power_of_2(programs)
        small.sum_of_tasks[(programs,)](
            gradients,
            total,
            parts,
            counters(gradients.device),
            inverse,
            tasks,
            size,
            BLOCK=ELEMENTS,
            PARTS=most,
            **OVERLAPPED,
        )
        small.share[(programs,)](
            gradients,
            total,
            inverse,
            stored,
            seen,
            m[step:],
            lam[step:],
            running,
            direction,
            tasks,
            size,
            BLOCK=ELEMENTS,
            **OVERLAPPED,
        )
        ctx.set_materialize_grads(False)  # or the running mean would get a gradient of zeros each time
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
        small.share_sums[(programs,)](
            v, gradients, total, inverse, stored, seen, running, m[step:], lam[step:], together, parts,
            counters(gradients.device), results, steps, step, tasks, size,
            BLOCK=ELEMENTS, PARTS=triton.next_power_of_2(programs), STEPS=triton.next_power_of_2(steps), **OVERLAPPED,
        )  # fmt: skip
        small.share_gradient[(programs,)](
            v, gradients, together, total, inverse, seen, m[step:], lam[step:], results, target, tasks, size,
            BLOCK=ELEMENTS, **OVERLAPPED,
        )  # fmt: skip
        return target, results[1 : 1 + steps], results[1 + steps :], None, None, None
