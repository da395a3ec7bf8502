"""The first block of Conv4, whose images do not change between inner steps.

Let X be the 3x3 patches of a task's images and C their covariance. The sums that batch norm needs of z = X w follow
from X's mean and C alone:

    mean(z) = mean(X) w        var(z) = w^T C w        mean(q y) = v^T C w / s   for q = X v        X^T y = N C w / s

So z is never stored. The gradients with respect to w are sums over the pooled elements (X^T a, with the symbols of
`pooled_norm.py`) and terms in C. These have the size of the filters, and C is computed once for all inner steps.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.conv4.cpu import pooled_norm as norms
from gradshare.engine.conv4.cpu.pooled_norm import First, Normalised, channels_last, channels_second, slices
from gradshare.engine.operations import Geometry, conv_backward
from gradshare.engine.vmapped import Kept

aten = torch.ops.aten


class Moments(NamedTuple):
    """Mean and covariance of the 3x3 patches of each task's images; K = 9 * channels."""

    mean: Tensor  # [tasks, K]
    covariance: Tensor  # [tasks, K, K]
    patches: int  # number of patches of a task


class Images:
    """Images [tasks, n, C, H, W], and what the first block needs to know about them, computed once."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.kept: Kept | None = Kept()

    def afresh(self) -> Images:
        """The same images, of which every inner step computes all."""
        images = Images(self.x)
        images.kept = None
        return images

    @cached_property
    def folded(self) -> Tensor:
        """The images as [n, tasks*C, H, W], channels last in memory."""
        tasks, n, channels, height, width = self.x.shape
        last = self.x.permute(1, 3, 4, 0, 2).contiguous().view(n, height, width, tasks * channels)
        return channels_second(last)

    @cached_property
    def moments(self) -> Moments:
        """Mean and covariance of the patches."""
        tasks, n, channels, height, width = self.x.shape
        level = self.x.mean((1, 3, 4), keepdim=True)  # subtracted, and added to the mean again: it keeps C accurate
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
    """Compute pooled_norm(conv(images, w)). The images get no gradient."""
    fixed = _Fixed(images.folded, images.moments, geometry, slope)
    return channels_second(_FirstBlock.apply(w, gain, bias, fixed, eps))


class _Fixed(NamedTuple):
    """What does not change between inner steps."""

    x: Tensor
    moments: Moments
    geometry: Geometry
    slope: float

    def matrix(self, w: Tensor) -> Tensor:  # [tasks*O, C, 3, 3] -> [tasks, O, K]
        return w.reshape(len(self.moments.mean), -1, self.moments.mean.shape[1])

    def means(self, matrix: Tensor) -> Tensor:  # [tasks*O]
        """Compute mean(X w)."""
        return (matrix @ self.moments.mean.unsqueeze(2)).flatten()

    def convolved(self, images: slice, w: Tensor) -> Tensor:  # [n, H, W, tasks*O]
        return channels_last(aten.convolution(self.x[images], w, None, *self.geometry)).contiguous()

    def shape(self, w: Tensor) -> tuple[int, ...]:
        return (len(self.x), *self.x.shape[2:], len(w))


class _FirstBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, gain: Tensor, bias: Tensor, fixed: _Fixed, eps: float) -> Tensor:
        matrix = fixed.matrix(w)
        cw = matrix @ fixed.moments.covariance  # C w, [tasks, O, K]
        mean, variance = fixed.means(matrix), (matrix * cw).sum(2).flatten()
        inverse = torch.rsqrt(variance + eps)
        y, places = norms.pooled_buffers(fixed.shape(w), w)
        out = torch.empty_like(y)
        for images in slices(fixed.shape(w)):
            norms.pool(fixed.convolved(images, w), y[images], places[images])
            norms.normalise(y[images], mean, inverse, gain, bias, fixed.slope, out[images])
        ctx.save_for_backward(w, gain, places, cw, y, out, inverse)
        ctx.fixed = fixed
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *others, y, out, inverse = ctx.saved_tensors
        return *_FirstBlockGradient.apply(ctx.fixed, g, *others, y, out.detach(), inverse), None, None


class _FirstBlockGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fixed: _Fixed, g: Tensor, w: Tensor, gain: Tensor, places: Tensor, cw: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, a = Normalised(*kept), torch.empty_like(g)
        xa = torch.zeros_like(w)  # X^T a
        sum_a, sum_ay = torch.zeros_like(gain), torch.zeros_like(gain)
        for images in slices(fixed.shape(w)):
            x, part = fixed.x[images], norms.activation_back(g[images], norm.out[images], fixed.slope, a[images])
            sum_a += norms.total(part)
            sum_ay += norms.total(part * norm.y[images])
            scattered = norms.put(part, places[images], g.new_empty(len(x), *fixed.shape(w)[1:]))
            xa += conv_backward(channels_second(scattered), x, w, fixed.geometry, [False, True, False])[1]
        once = norms.first_derivative(a, sum_a, sum_ay, norm.inverse, gain, fixed.moments.patches)
        ctx.save_for_backward(w, gain, places, cw, xa, *norm, *once)
        ctx.fixed = fixed
        ctx.set_materialize_grads(False)
        to_w = _times_patches(fixed, once.of_a, xa, once.of_y * norm.inverse, cw, once.constant)
        return to_w.view(w.shape), once.sum_ay, once.sum_a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, v_gain: Tensor | None, v_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        w, gain, places, cw, xa, *kept = ctx.saved_tensors
        fixed, norm, once = ctx.fixed, Normalised(*kept[:3]), First(*kept[3:])
        v = torch.zeros_like(w) if v is None else v
        matrix = fixed.matrix(v)
        cv = matrix @ fixed.moments.covariance  # C v
        mean_q, mean_qy = fixed.means(matrix), (matrix * cw).sum(2).flatten() * norm.inverse
        parts = [norms.take(fixed.convolved(images, v), places[images]) for images in slices(fixed.shape(w))]
        q = parts[0] if len(parts) == 1 else torch.cat(parts)  # cat would copy also one part
        count = fixed.moments.patches
        twice = norms.second_derivative(q, mean_q, mean_qy, v_gain, v_bias, once, norm, gain, fixed.slope, count)
        constant = twice.constant + twice.of_v * mean_q
        to_w = _times_patches(fixed, twice.of_a, xa, twice.of_y * norm.inverse, cw, constant)
        to_w.addcmul_(twice.of_v.view(*to_w.shape[:2], 1), cv, value=count)
        return None, twice.to_g, to_w.view(w.shape), twice.to_gain, *(None,) * 5


def _times_patches(fixed: _Fixed, of_a: Tensor, xa: Tensor, of_cw: Tensor, cw: Tensor, constant: Tensor) -> Tensor:
    """Compute X^T (of_a a + of_y y + constant), [tasks, O, K]; `of_cw` is of_y / s."""
    count = fixed.moments.patches

    def column(factor: Tensor) -> Tensor:  # [tasks*O] -> [tasks, O, 1]
        return factor.view(*cw.shape[:2], 1)

    total = fixed.matrix(xa) * column(of_a)
    total.addcmul_(column(of_cw), cw, value=count)
    return total.addcmul_(column(constant), fixed.moments.mean.unsqueeze(1), value=count)
