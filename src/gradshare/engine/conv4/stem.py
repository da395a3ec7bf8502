"""The first block of Conv4, whose images never change.

Batch norm's sums over z = X w, X the patches of a task's images, follow from X's mean and covariance C alone:

    mean(z) = mean(X) w        var(z) = w^T C w        mean(q y) = v^T C w / s   for q = X v        X^T y = N C w / s

So z is never kept, and the gradients by w are sums over the pooled elements (X^T a, in the terms of pooled_norm.py) and
terms in C. These are as large as the filters, and C is made once for all inner steps.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.conv4 import pooled_norm as norms
from gradshare.engine.conv4.pooled_norm import First, Normal, channels_last, channels_second, slices
from gradshare.engine.convolution import Geometry, conv_backward

aten = torch.ops.aten


class Moments(NamedTuple):
    """Of the 3x3 patches of all images of a task, K = 9 * channels."""

    mean: Tensor  # [tasks, K]
    covariance: Tensor  # [tasks, K, K]
    number: int  # of the patches


class Images:
    """Images, [tasks, n, C, H, W], and what the first block needs of them."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @cached_property
    def folded(self) -> Tensor:
        """[n, tasks*C, H, W], channels last."""
        tasks, n, channels, height, width = self.x.shape
        last = self.x.permute(1, 3, 4, 0, 2).contiguous().view(n, height, width, tasks * channels)
        return channels_second(last)

    @cached_property
    def moments(self) -> Moments:
        tasks, n, channels, height, width = self.x.shape
        level = self.x.mean((1, 3, 4), keepdim=True)  # taken from all pixels and put back: it keeps C accurate
        sums = self.x.new_zeros(tasks, 9 * channels)
        products = self.x.new_zeros(tasks, 9 * channels, 9 * channels)
        for images in slices((n, height, width, tasks * channels * 9)):
            framed = F.pad(self.x[:, images], (1, 1, 1, 1)) - level
            patches = framed.new_empty(*framed.shape[:3], 3, 3, height, width)
            for row in range(3):
                for column in range(3):
                    patches[:, :, :, row, column] = framed[..., row : row + height, column : column + width]
            matrix = patches.view(-1, 9 * channels, height * width)
            products += torch.bmm(matrix, matrix.mT).unflatten(0, (tasks, -1)).sum(1)
            sums += matrix.sum(2).unflatten(0, (tasks, -1)).sum(1)
        count = n * height * width
        mean = sums / count
        covariance = products / count - mean.unsqueeze(2) * mean.unsqueeze(1)
        return Moments(mean + level.view(tasks, -1, 1).expand(-1, -1, 9).flatten(1), covariance, count)


def first_block(
    images: Images,
    w: Tensor,  # [tasks*O, C, 3, 3]
    gain: Tensor,  # [tasks*O], positive
    bias: Tensor,  # [tasks*O]
    geometry: Geometry,
    eps: float,
    slope: float,
) -> Tensor:  # [n, tasks*O, H/2, W/2], channels last
    """pooled_norm(conv(images, w)). The images get no gradient."""
    return channels_second(_Stem.apply(w, gain, bias, _Stage(images.folded, images.moments, geometry, slope), eps))


class _Stage(NamedTuple):
    """What does not change."""

    x: Tensor
    moments: Moments
    geometry: Geometry
    slope: float

    def matrix(self, w: Tensor) -> Tensor:  # [tasks*O, C, 3, 3] -> [tasks, O, K]
        return w.reshape(len(self.moments.mean), -1, self.moments.mean.shape[1])

    def means(self, matrix: Tensor) -> Tensor:  # [tasks*O]
        """mean(X w)."""
        return (matrix @ self.moments.mean.unsqueeze(2)).flatten()

    def convolved(self, images: slice, w: Tensor) -> Tensor:  # [n, H, W, tasks*O]
        return channels_last(aten.convolution(self.x[images], w, None, *self.geometry)).contiguous()

    def shape(self, w: Tensor) -> tuple[int, ...]:
        return (len(self.x), *self.x.shape[2:], len(w))


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, gain: Tensor, bias: Tensor, stage: _Stage, eps: float) -> Tensor:
        matrix = stage.matrix(w)
        spread = matrix @ stage.moments.covariance
        mean, variance = stage.means(matrix), (matrix * spread).sum(2).flatten()
        inverse = torch.rsqrt(variance + eps)
        y, places = norms.room(stage.shape(w), w)
        out = torch.empty_like(y)
        for images in slices(stage.shape(w)):
            norms.pool(stage.convolved(images, w), y[images], places[images])
            norms.normalise(y[images], mean, inverse, gain, bias, stage.slope, out[images])
        ctx.save_for_backward(w, gain, places, spread, y, out, inverse)
        ctx.stage = stage
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *others, y, out, inverse = ctx.saved_tensors
        return *_Derivative.apply(ctx.stage, g, *others, y, out.detach(), inverse), None, None


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stage: _Stage, g: Tensor, w: Tensor, gain: Tensor, places: Tensor, spread: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, a = Normal(*kept), torch.empty_like(g)
        with_a = torch.zeros_like(w)  # X^T a
        sum_a, sum_ay = torch.zeros_like(gain), torch.zeros_like(gain)
        for images in slices(stage.shape(w)):
            x, part = stage.x[images], norms.activation_back(g[images], norm.out[images], stage.slope, a[images])
            sum_a += norms.total(part)
            sum_ay += norms.total(part * norm.y[images])
            spread_out = norms.put(part, places[images], g.new_empty(len(x), *stage.shape(w)[1:]))
            with_a += conv_backward(channels_second(spread_out), x, w, stage.geometry, [False, True, False])[1]
        once = norms.first(a, sum_a, sum_ay, norm.inverse, gain, stage.moments.number)
        ctx.save_for_backward(w, gain, places, spread, with_a, *norm, *once)
        ctx.stage = stage
        ctx.set_materialize_grads(False)
        to_w = _times(stage, once.of_a, with_a, once.of_y * norm.inverse, spread, once.constant)
        return to_w.view(w.shape), once.sum_ay, once.sum_a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, v_gain: Tensor | None, v_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        w, gain, places, spread, with_a, *kept = ctx.saved_tensors
        stage, norm, once = ctx.stage, Normal(*kept[:3]), First(*kept[3:])
        v = torch.zeros_like(w) if v is None else v
        matrix = stage.matrix(v)
        spread_v = matrix @ stage.moments.covariance
        mean_q, mean_qy = stage.means(matrix), (matrix * spread).sum(2).flatten() * norm.inverse
        q = norms.joined([norms.take(stage.convolved(images, v), places[images]) for images in slices(stage.shape(w))])
        twice = norms.second(q, mean_q, mean_qy, v_gain, v_bias, once, norm, gain, stage.slope, stage.moments.number)
        constant = twice.constant + twice.of_v * mean_q
        to_w = _times(stage, twice.of_a, with_a, twice.of_y * norm.inverse, spread, constant)
        to_w.addcmul_(twice.of_v.view(*to_w.shape[:2], 1), spread_v, value=stage.moments.number)
        return None, twice.to_g, to_w.view(w.shape), twice.to_gain, *(None,) * 5


def _times(stage: _Stage, of_a: Tensor, with_a: Tensor, of_spread: Tensor, spread: Tensor, constant: Tensor) -> Tensor:
    """X^T (of_a a + of_y y + constant), [tasks, O, K]; `of_spread` is of_y / s."""
    count = stage.moments.number

    def column(factor: Tensor) -> Tensor:  # [tasks*O] -> [tasks, O, 1]
        return factor.view(*spread.shape[:2], 1)

    total = stage.matrix(with_a) * column(of_a)
    total.addcmul_(column(of_spread), spread, value=count)
    return total.addcmul_(column(constant), stage.moments.mean.unsqueeze(1), value=count)
