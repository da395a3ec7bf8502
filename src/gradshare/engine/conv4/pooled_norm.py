"""Batch norm on the statistics of the batch, 2x2 max pooling and leaky ReLU as one function, twice differentiable.

With a positive gain the largest element of a window is the same before and after batch norm. So pooling comes first,
and everything after it, and the gradient until it comes back there, is a quarter of the work. In the terms of
normalisation.py, with a the gradient by the output taken back through the activation (one element for every window,
zero elsewhere), the derivative maps g to (z', w', b') = (w P(a), sum(a y), sum(a)). The derivative of that, applied to
(v, vw, vb), is

    towards g:  w P(v) + vw y + vb                        at the pooled elements, through the activation
    towards w:  R = sum(a P(v))                           a sum over the pooled elements
    towards z:  -y w R / (N s) - P(v) w mean(a y) / s + P(a) (vw - w mean(v y) / s)

Written out, both z' and the last line are a sum of a, y, v and a constant, each times a number for the channel.

Images are [n, H, W, C] here. Passes over large ones go a few at a time, so that what one operation writes the next
finds in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.pooling import WINDOW

aten = torch.ops.aten
AT_A_TIME = 2**20  # elements


def pooled_norm(
    z: Tensor,  # [n, C, H, W]
    gain: Tensor,  # [C], positive
    bias: Tensor,  # [C]
    eps: float,
    slope: float,
) -> Tensor:  # [n, C, H/2, W/2], channels last
    """leaky_relu(max_pool2d(batch_norm(z), 2))."""
    # Not inside the function: what it saves for its derivatives must be its input, and not a copy without a history.
    z = channels_last(z).contiguous()
    return channels_second(_PooledNorm.apply(z, gain, bias, eps, slope))


def channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def channels_second(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """A few images at a time."""
    n, height, width, channels = shape
    each = max(1, AT_A_TIME // (height * width * channels))
    return (slice(first, first + each) for first in range(0, n, each))


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def room(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """What `pool` writes to for images of this shape: values and places, [n, H/2, W/2, C] both."""
    n, height, width, channels = shape
    top = like.new_empty(n, height // 2, width // 2, channels)
    return top, torch.empty_like(top, dtype=torch.long)


def pool(z: Tensor, top: Tensor, places: Tensor) -> None:
    """Find the largest element of each window, and its place in its image."""
    aten.max_pool2d_with_indices.out(
        channels_second(z), *WINDOW, out=channels_second(top), indices=channels_second(places)
    )


def take(z: Tensor, places: Tensor) -> Tensor:
    """The elements in these places."""
    return z.flatten(1, 2).gather(1, places.flatten(1, 2)).view_as(places)


def put(a: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """The reverse: zeros but for a in its places, of the shape of `like`."""
    return channels_last(
        aten.max_pool2d_with_indices_backward(
            channels_second(a), channels_second(like), *WINDOW, channels_second(places)
        )
    )


class Normal(NamedTuple):
    """What batch norm gives at the pooled elements."""

    y: Tensor  # normalised, [n, H/2, W/2, C]
    out: Tensor  # the same with gain, bias and activation
    inverse: Tensor  # 1 / s, [C]


def normalise(y: Tensor, mean: Tensor, inverse: Tensor, gain: Tensor, bias: Tensor, slope: float, out: Tensor) -> None:
    """From z in `y`: normalise it in place, and write `out`."""
    torch.addcmul(bias, y.sub_(mean).mul_(inverse), gain, out=out)
    torch.nn.functional.leaky_relu_(out, slope)


def total(x: Tensor) -> Tensor:  # [n, H, W, C] -> [C]
    return x.sum((0, 1, 2))


class First(NamedTuple):
    """What the first derivative makes of the gradient by the output. z' = of_a a + of_y y + constant."""

    a: Tensor
    sum_a: Tensor
    sum_ay: Tensor
    of_a: Tensor
    of_y: Tensor
    constant: Tensor


def activation_back(g: Tensor, out: Tensor, slope: float, a: Tensor) -> Tensor:
    """Write a, from the gradient by the output."""
    return aten.leaky_relu_backward.grad_input(g, out, slope, False, grad_input=a)


def first(a: Tensor, sum_a: Tensor, sum_ay: Tensor, inverse: Tensor, gain: Tensor, count: int) -> First:
    of_a = gain * inverse
    mean = of_a / -count
    return First(a, sum_a, sum_ay, of_a, mean * sum_ay, mean * sum_a)


class Second(NamedTuple):
    """The second derivative, but for that by z, which is of_a a + of_y y + of_v v + constant."""

    to_g: Tensor
    to_gain: Tensor
    of_a: Tensor
    of_y: Tensor
    of_v: Tensor
    constant: Tensor


def second(
    v: Tensor,  # at the pooled elements; is overwritten
    mean_v: Tensor,
    mean_vy: Tensor,
    v_gain: Tensor | None,
    v_bias: Tensor | None,
    once: First,
    norm: Normal,
    gain: Tensor,
    slope: float,
    count: int,
) -> Second:
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
        y, places = room(z.shape, z)
        shares, means, variances = [], [], []
        for images in slices(z.shape):
            part = z[images]
            pool(part, y[images], places[images])
            mean, variance = aten.batch_norm_update_stats(channels_second(part), None, None, 0.0)
            shares.append(len(part) / len(z))
            means.append(mean)
            variances.append(variance)
        mean, variance = _together(shares, means, variances)
        inverse, out = torch.rsqrt(variance + eps), torch.empty_like(y)
        normalise(y, mean, inverse, gain, bias, slope, out)
        ctx.save_for_backward(z, gain, mean, places, y, out, inverse)
        ctx.slope = slope
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *others, y, out, inverse = ctx.saved_tensors
        return *_Derivative.apply(ctx.slope, g, *others, y, out.detach(), inverse), None, None


def _together(shares: list[float], means: list[Tensor], variances: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of a whole from those of its parts."""
    if len(shares) == 1:
        return means[0], variances[0]
    share, mean = means[0].new_tensor(shares).unsqueeze(1), torch.stack(means)
    centre = (share * mean).sum(0)
    return centre, (share * (torch.stack(variances) + (mean - centre).square())).sum(0)


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slope: float, g: Tensor, z: Tensor, gain: Tensor, mean: Tensor, places: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, count = Normal(*kept), z.numel() // z.shape[-1]
        a = activation_back(g, norm.out, slope, torch.empty_like(norm.out))
        once = first(a, total(a), total(a * norm.y), norm.inverse, gain, count)
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
        norm, once = Normal(*kept[:3]), First(*kept[3:])
        v = torch.zeros_like(z) if v is None else v.contiguous()
        mean_v = total(v) / ctx.count
        mean_vy = (total(v * z) / ctx.count - mean * mean_v) * norm.inverse
        twice = second(take(v, places), mean_v, mean_vy, v_gain, v_bias, once, norm, gain, ctx.slope, ctx.count)
        of_z = twice.of_y * norm.inverse
        constant, to_z = twice.constant - of_z * mean, torch.empty_like(z)
        for images in slices(z.shape):
            part = put(once.a[images] * twice.of_a, places[images], z[images])
            part.addcmul_(z[images], of_z).addcmul_(v[images], twice.of_v)
            torch.add(part, constant, out=to_z[images])
        return None, twice.to_g, to_z, twice.to_gain, *(None,) * 5
