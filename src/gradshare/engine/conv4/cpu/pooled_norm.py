"""Batch norm with the statistics of the batch, 2x2 max pooling and leaky ReLU as one function, twice differentiable.

With a positive gain the largest element of a window is the same before and after batch norm. So we pool first, and all
later work, forward and backward, is done on a quarter of the elements.

The symbols are those of `engine/operations.py`. Let a be the gradient with respect to the output, taken back through
the activation: one element for each window, zero elsewhere. The first derivative maps g to
(z', w', b') = (w P(a), sum(a y), sum(a)). The derivative of that map, applied to (v, vw, vb), is

    with respect to g:  w P(v) + vw y + vb                at the pooled elements, through the activation
    with respect to w:  R = sum(a P(v))                   a sum over the pooled elements
    with respect to z:  -y w R / (N s) - P(v) w mean(a y) / s + P(a) (vw - w mean(v y) / s)

Written out, both z' and the last line are a sum of a, y, v and a constant, each times a coefficient for the channel.

Images are [n, H, W, C] here. Large tensors are processed a few images at a time, so that an operation finds its input
in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.operations import WINDOW

aten = torch.ops.aten
AT_A_TIME = 2**20  # elements that are processed at a time


def pooled_norm(
    z: Tensor,  # [n, C, H, W]
    gain: Tensor,  # [C], positive
    bias: Tensor,  # [C]
    eps: float,
    slope: float,
) -> Tensor:  # [n, C, H/2, W/2], channels last
    """Compute leaky_relu(max_pool2d(batch_norm(z), 2))."""
    # Made contiguous here: inside the autograd function it would save a copy that is not part of the graph.
    z = channels_last(z).contiguous()
    return channels_second(_PooledNorm.apply(z, gain, bias, eps, slope))


def channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def channels_second(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """Divide the images into slices of about AT_A_TIME elements."""
    n, height, width, channels = shape
    each = max(1, AT_A_TIME // (height * width * channels))
    return (slice(first, first + each) for first in range(0, n, each))


def pooled_buffers(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate what `pool` writes for images of this shape: values and places, both [n, H/2, W/2, C]."""
    n, height, width, channels = shape
    top = like.new_empty(n, height // 2, width // 2, channels)
    return top, torch.empty_like(top, dtype=torch.long)


def pool(z: Tensor, top: Tensor, places: Tensor) -> None:
    """Write the largest element of each window, and its place in its image."""
    aten.max_pool2d_with_indices.out(
        channels_second(z), *WINDOW, out=channels_second(top), indices=channels_second(places)
    )


def take(z: Tensor, places: Tensor) -> Tensor:
    """Read the elements at these places."""
    return z.flatten(1, 2).gather(1, places.flatten(1, 2)).view_as(places)


def put(a: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """The reverse of `take`: a at these places and zero elsewhere, in the shape of `like`."""
    return channels_last(
        aten.max_pool2d_with_indices_backward(
            channels_second(a), channels_second(like), *WINDOW, channels_second(places)
        )
    )


class Normalised(NamedTuple):
    """Results of batch norm at the pooled elements."""

    y: Tensor  # normalised, [n, H/2, W/2, C]
    out: Tensor  # y with gain, bias and activation, [n, H/2, W/2, C]
    inverse: Tensor  # 1 / s, [C]


def normalise(y: Tensor, mean: Tensor, inverse: Tensor, gain: Tensor, bias: Tensor, slope: float, out: Tensor) -> None:
    """Normalise `y`, which holds z, in place, and write `out`."""
    torch.addcmul(bias, y.sub_(mean).mul_(inverse), gain, out=out)
    torch.nn.functional.leaky_relu_(out, slope)


def total(x: Tensor) -> Tensor:  # [n, H, W, C] -> [C]
    return x.sum((0, 1, 2))


class First(NamedTuple):
    """The first derivative: z' = of_a a + of_y y + constant."""

    a: Tensor
    sum_a: Tensor
    sum_ay: Tensor
    of_a: Tensor
    of_y: Tensor
    constant: Tensor


def activation_back(g: Tensor, out: Tensor, slope: float, a: Tensor) -> Tensor:
    """Write a, computed from the gradient with respect to the output."""
    return aten.leaky_relu_backward.grad_input(g, out, slope, False, grad_input=a)


def first_derivative(a: Tensor, sum_a: Tensor, sum_ay: Tensor, inverse: Tensor, gain: Tensor, count: int) -> First:
    """Compute the coefficients of z' for each channel; `count` is N."""
    of_a = gain * inverse
    mean = of_a / -count
    return First(a, sum_a, sum_ay, of_a, mean * sum_ay, mean * sum_a)


class Second(NamedTuple):
    """The second derivative; with respect to z it is of_a a + of_y y + of_v v + constant."""

    to_g: Tensor
    to_gain: Tensor
    of_a: Tensor
    of_y: Tensor
    of_v: Tensor
    constant: Tensor


def second_derivative(
    v: Tensor,  # at the pooled elements; overwritten
    mean_v: Tensor,
    mean_vy: Tensor,
    v_gain: Tensor | None,
    v_bias: Tensor | None,
    once: First,
    norm: Normalised,
    gain: Tensor,
    slope: float,
    count: int,
) -> Second:
    """Compute what `Second` holds; `once` is the first derivative."""
    inverse = norm.inverse
    p = v.sub_(mean_v).addcmul_(norm.y, mean_vy, value=-1).mul_(inverse)  # P(v)
    r = total(once.a * p)
    to_out = p.mul_(gain)
    if v_gain is not None:
        to_out.addcmul_(norm.y, v_gain)
    if v_bias is not None:
        to_out += v_bias
    to_g = aten.leaky_relu_backward(to_out, norm.out, slope, False)
    scale, mean_ay = gain * inverse, once.sum_ay / count
    of_v = -scale * mean_ay * inverse
    of_a = inverse * (-scale * mean_vy if v_gain is None else v_gain - scale * mean_vy)
    of_y = -scale * r / count - of_v * mean_vy - of_a * mean_ay
    return Second(to_g, r, of_a, of_y, of_v, -of_v * mean_v - of_a * once.sum_a / count)


class _PooledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
        y, places = pooled_buffers(z.shape, z)
        shares, means, variances = [], [], []
        for images in slices(z.shape):
            part = z[images]
            pool(part, y[images], places[images])
            mean, variance = aten.batch_norm_update_stats(channels_second(part), None, None, 0.0)
            shares.append(len(part) / len(z))
            means.append(mean)
            variances.append(variance)
        mean, variance = _combined(shares, means, variances)
        inverse, out = torch.rsqrt(variance + eps), torch.empty_like(y)
        normalise(y, mean, inverse, gain, bias, slope, out)
        ctx.save_for_backward(z, gain, mean, places, y, out, inverse)
        ctx.slope = slope
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *others, y, out, inverse = ctx.saved_tensors
        return *_PooledNormGradient.apply(ctx.slope, g, *others, y, out.detach(), inverse), None, None


def _combined(shares: list[float], means: list[Tensor], variances: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine mean and variance of parts into those of the whole."""
    if len(shares) == 1:
        return means[0], variances[0]
    share, mean = means[0].new_tensor(shares).unsqueeze(1), torch.stack(means)
    centre = (share * mean).sum(0)
    return centre, (share * (torch.stack(variances) + (mean - centre).square())).sum(0)


class _PooledNormGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slope: float, g: Tensor, z: Tensor, gain: Tensor, mean: Tensor, places: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, count = Normalised(*kept), z.numel() // z.shape[-1]
        a = activation_back(g, norm.out, slope, torch.empty_like(norm.out))
        once = first_derivative(a, total(a), total(a * norm.y), norm.inverse, gain, count)
        ctx.save_for_backward(z, gain, mean, places, *norm, *once)
        ctx.slope, ctx.count = slope, count
        ctx.set_materialize_grads(False)
        of_z = once.of_y * norm.inverse
        constant, to_z = once.constant - of_z * mean, torch.empty_like(z)
        for images in slices(z.shape):
            part = put(once.a[images] * once.of_a, places[images], z[images])
            torch.add(part.addcmul_(z[images], of_z), constant, out=to_z[images])
        return to_z, once.sum_ay, once.sum_a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, v_gain: Tensor | None, v_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        z, gain, mean, places, *kept = ctx.saved_tensors
        norm, once = Normalised(*kept[:3]), First(*kept[3:])
        v = torch.zeros_like(z) if v is None else v.contiguous()
        mean_v = total(v) / ctx.count
        mean_vy = (total(v * z) / ctx.count - mean * mean_v) * norm.inverse
        twice = second_derivative(
            take(v, places), mean_v, mean_vy, v_gain, v_bias, once, norm, gain, ctx.slope, ctx.count
        )
        of_z = twice.of_y * norm.inverse
        constant, to_z = twice.constant - of_z * mean, torch.empty_like(z)
        for images in slices(z.shape):
            part = put(once.a[images] * twice.of_a, places[images], z[images])
            part.addcmul_(z[images], of_z).addcmul_(v[images], twice.of_v)
            torch.add(part, constant, out=to_z[images])
        return None, twice.to_g, to_z, twice.to_gain, *(None,) * 5
