"""Batch norm of many tasks at once, each task with its own statistics, gain and bias, twice differentiable.

F.batch_norm under vmap has a silently wrong second derivative when gain and bias differ between tasks, and in plain
operations its derivatives take dozens of passes over the activations. Here value and first derivative are PyTorch's
fused kernels, and the second derivative is written in terms of the first.

For one channel of one task, with N elements, y = (x - mean(x)) / s, s = sqrt(var(x) + eps), and

    P(z) = (z - mean(z) - y mean(z y)) / s           the derivative of y, applied to z; symmetric

batch norm is w y + b. Its derivative maps g to (x', w', b') = (w P(g), sum(g y), sum(g)). The derivative of that,
applied to (v, vw, vb), is

    towards g:  w P(v) + vw y + vb
    towards w:  R = sum(g P(v))
    towards x:  -y w R / (N s) - P(v) w mean(g y) / s + P(g) (vw - w mean(v y) / s)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.convolution import fold_tasks, unfold_tasks

aten = torch.ops.aten


def batch_norm(
    x: Tensor,  # [tasks, n, C, ...]
    gain: Tensor,  # [tasks, C]
    bias: Tensor,  # [tasks, C]
    eps: float,
) -> Tensor:
    """Normalise each task's images with that task's own statistics."""
    return _BatchNorm.apply(x, gain, bias, eps)[0]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:  # [tasks, C] -> [tasks, 1, C, 1, ...]
    return values.view(len(values), 1, -1, *(1 for _ in range(3, like.dim())))


def _derivative(g: Tensor, x: Tensor, gain: Tensor | None, mean: Tensor, inverse: Tensor, eps: float) -> list[Tensor]:
    """(w P(g), sum(g y), sum(g)); `gain=None` means w = 1."""
    tasks, flat = len(x), None if gain is None else gain.flatten()
    images = [fold_tasks(value).contiguous() for value in (g, x)]
    statistics = [None, None, mean.flatten(), inverse.flatten()]
    to_x, to_gain, to_bias = aten.native_batch_norm_backward(*images, flat, *statistics, True, eps, [True, True, True])
    return [unfold_tasks(to_x, tasks), to_gain.view(tasks, -1), to_bias.view(tasks, -1)]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        tasks, folded = len(x), fold_tasks(x)
        y, mean, inverse = aten.native_batch_norm(folded, gain.flatten(), bias.flatten(), None, None, True, 0.0, eps)
        y, mean, inverse = unfold_tasks(y, tasks), mean.view(tasks, -1), inverse.view(tasks, -1)
        ctx.save_for_backward(x, gain, mean, inverse)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, inverse)
        return y, mean, inverse

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_Derivative.apply(g, *ctx.saved_tensors, ctx.eps), None


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Any:
        ctx.save_for_backward(g, x, gain, mean, inverse)
        ctx.eps = eps
        return tuple(_derivative(g, x, gain, mean, inverse, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, v_gain: Tensor, v_bias: Tensor) -> tuple[Tensor | None, ...]:
        g, x, gain, mean, inverse = ctx.saved_tensors
        p_v, sum_vy, _ = _derivative(v, x, None, mean, inverse, ctx.eps)
        p_g, sum_gy, _ = _derivative(g, x, None, mean, inverse, ctx.eps)
        r = (g * p_v).sum((1, *range(3, x.dim())))
        count = x[0].numel() / x.shape[2]

        def spread(values: Tensor) -> Tensor:
            return _per_channel(values, x)

        # y = x * inverse - mean * inverse, folded into the coefficients of x
        to_g = spread(gain) * p_v + spread(v_gain * inverse) * x + spread(v_bias - v_gain * inverse * mean)
        y_share = -gain * r * inverse.square() / count
        to_x = (
            spread(y_share) * x
            - spread(y_share * mean)
            - spread(gain * inverse * sum_gy / count) * p_v
            + spread(v_gain - gain * inverse * sum_vy / count) * p_g
        )
        return to_g, to_x, r, None, None, None
