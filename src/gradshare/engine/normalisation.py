"""Batch norm on the statistics of the batch, twice differentiable and fast.

In plain operations its derivatives take dozens of passes over the activations. Here value and first derivative are
PyTorch's fused kernels, and the second derivative is written in terms of the first.

For one channel with N elements, y = (x - mean(x)) / s, s = sqrt(var(x) + eps), and

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

from gradshare.errors import UserError

aten = torch.ops.aten


def batch_norm(
    x: Tensor,  # [n, C, ...]
    gain: Tensor,  # [C]
    bias: Tensor,  # [C]
    eps: float,
) -> Tensor:  # [n, C, ...]
    """Normalise every channel with the batch's own statistics."""
    if x.numel() == x.shape[1]:
        raise UserError(
            "batch norm needs more than 1 value per channel to normalise with the batch's own statistics;"
            f" here it gets images of {list(x.shape[2:])}, one of each channel: give a task more examples"
        )
    return _BatchNorm.apply(x, gain, bias, eps)[0]


def _derivative(g: Tensor, x: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Any:
    """(w P(g), sum(g y), sum(g))."""
    statistics = (None, None, mean, inverse)
    return aten.native_batch_norm_backward(
        g.contiguous(), x.contiguous(), gain, *statistics, True, eps, [True, True, True]
    )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, inverse = aten.native_batch_norm(x, gain, bias, None, None, True, 0.0, eps)
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
        return _derivative(g, x, gain, mean, inverse, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, v_gain: Tensor, v_bias: Tensor) -> tuple[Tensor | None, ...]:
        g, x, gain, mean, inverse = ctx.saved_tensors
        one = torch.ones_like(gain)
        p_v, sum_vy, _ = _derivative(v, x, one, mean, inverse, ctx.eps)
        p_g, sum_gy, _ = _derivative(g, x, one, mean, inverse, ctx.eps)
        r = (g * p_v).sum((0, *range(2, x.dim())))
        count = x.numel() / x.shape[1]

        def spread(values: Tensor) -> Tensor:  # [C] -> [1, C, 1, ...]
            return values.view(1, -1, *(1 for _ in range(2, x.dim())))

        # y = x * inverse - mean * inverse, taken into the coefficients of x
        to_g = spread(gain) * p_v + spread(v_gain * inverse) * x + spread(v_bias - v_gain * inverse * mean)
        y_share = -gain * r * inverse.square() / count
        to_x = (
            spread(y_share) * x
            - spread(y_share * mean)
            - spread(gain * inverse * sum_gy / count) * p_v
            + spread(v_gain - gain * inverse * sum_vy / count) * p_g
        )
        return to_g, to_x, r, None, None, None
