"""What the kernels compute, in plain operations, of any order by autograd. Slow, and easy to read.

Activations are [tasks, images, height, width, channels], as the kernels have them. Which element of a window max
pooling takes is given, as the kernels' `code`: its number in the window, + 4 where it is above 0. So everything here is
smooth, and rounding cannot choose another element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def conv(x: Tensor, w: Tensor) -> Tensor:  # [T, n, H, W, C], [T, taps * C, O] -> [T, n, H, W, O]
    """3x3, or 1x1 where there is one tap."""
    side = 1 if w.shape[1] == x.shape[-1] else 3

    def one_task(x: Tensor, w: Tensor) -> Tensor:
        filters = w.unflatten(0, (side, side, -1)).permute(3, 2, 0, 1)
        return F.conv2d(x.permute(0, 3, 1, 2), filters, padding=side // 2).permute(0, 2, 3, 1)

    return torch.stack([one_task(*pair) for pair in zip(x, w, strict=True)])


def towards_images(g: Tensor, w: Tensor, taps: int) -> Tensor:  # [T, n, H, W, O], [T, taps * C, O] -> [T, n, H, W, C]
    x = g.new_zeros(*g.shape[:-1], w.shape[1] // taps, requires_grad=True)
    return torch.autograd.grad(conv(x, w), x, g)[0]


def towards_filters(x: Tensor, g: Tensor, taps: int) -> Tensor:  # -> [T, taps * C, O]
    w = x.new_zeros(len(x), taps * x.shape[-1], g.shape[-1], requires_grad=True)
    return torch.autograd.grad(conv(x, w), w, g)[0]


def windows(x: Tensor) -> Tensor:  # [T, n, H, W, C] -> [T, n, H/2, W/2, 4, C]
    """The four elements that pooling takes together; an odd last row or column is in none."""
    down, across = x.shape[2] // 2, x.shape[3] // 2
    whole = x[:, :, : 2 * down, : 2 * across]
    return whole.unflatten(3, (across, 2)).unflatten(2, (down, 2)).transpose(3, 4).flatten(4, 5)


def taken(x: Tensor, code: Tensor) -> Tensor:  # [T, n, H/2, W/2, C]
    """The element of each window that the code says."""
    return windows(x).gather(4, (code % 4).long().unsqueeze(4)).squeeze(4)


def put_back(g: Tensor, code: Tensor, height: int, width: int) -> Tensor:  # [T, n, H, W, C]
    """The transpose of `taken`."""
    x = g.new_zeros(*g.shape[:2], height, width, g.shape[-1], requires_grad=True)
    return torch.autograd.grad(taken(x, code), x, g)[0]


def activated(x: Tensor, code: Tensor, slope: float) -> Tensor:
    """Leaky ReLU, and its derivative applied to x."""
    return torch.where(code >= 4, x, slope * x)


def over_positions(x: Tensor) -> Tensor:  # [T, n, H, W, C] -> [T, C]
    return x.mean((1, 2, 3))


def statistics(z: Tensor, eps: float) -> Tensor:  # [T, 2, C]
    """Mean and 1 / deviation."""
    mean = over_positions(z)
    variance = over_positions((z - mean[:, None, None, None]).square())
    return torch.stack([mean, (variance + eps).rsqrt()], 1)


def normalised(z: Tensor, statistics: Tensor) -> Tensor:
    mean, inverse = (part[:, None, None, None] for part in statistics.unbind(1))
    return (z - mean) * inverse


def block(z: Tensor, gain: Tensor, bias: Tensor, code: Tensor, eps: float, slope: float) -> Tensor:
    """Batch norm, with gain and bias [T, C], max pool and leaky ReLU."""
    y = normalised(z, statistics(z, eps))
    return activated(taken(y * gain[:, None, None, None] + bias[:, None, None, None], code), code, slope)


class Orders(NamedTuple):
    """A block's derivatives, with g the inner gradient by its output, q what comes back to the first derivative (its
    gradient by z), and c the outer gradient by its output."""

    dz: Tensor  # first derivative, by z
    means: Tensor  # [T, 2, C]: of a and a y, a being g by the normalised activations
    later_means: Tensor  # the same for c
    to_g: Tensor  # second derivative, by g
    mixed: Tensor  # [T, C]: second derivative by the gain, over the positions: mean(a P(q))
    cz: Tensor  # by z: of c through the block, and of q through dz


def orders(z: Tensor, gain: Tensor, code: Tensor, g: Tensor, q: Tensor, c: Tensor, eps: float, slope: float) -> Orders:
    z, g = z.clone().requires_grad_(), g.clone().requires_grad_()
    gain = gain.expand(len(z), -1).clone().requires_grad_()
    bias = torch.zeros_like(gain, requires_grad=True)
    count = z[0].numel() / z.shape[-1]
    out = block(z, gain, bias, code, eps, slope)
    dz, sum_ay, sum_a = torch.autograd.grad(out, (z, gain, bias), g, create_graph=True)
    to_g, sum_mixed, from_dz = torch.autograd.grad(dz, (g, gain, z), q, retain_graph=True)
    from_out, sum_cy, sum_c = torch.autograd.grad(out, (z, gain, bias), c)
    return Orders(
        dz.detach(),
        torch.stack([sum_a, sum_ay], 1).detach() / count,
        torch.stack([sum_c, sum_cy], 1) / count,
        to_g,
        sum_mixed / count,
        from_out + from_dz,
    )


def patches(x: Tensor, centre: Tensor) -> Tensor:  # [T, n, C, H, W], [T, C] -> [T, n, H, W, 9 * C]
    """3x3 patches less `centre`, the zeros around the images included; all channels of the first tap come first."""
    tasks, n, channels, height, width = x.shape
    level = centre.repeat(1, 9)
    columns = F.unfold(x.flatten(0, 1), 3, padding=1).view(tasks, n, channels, 9, height, width)
    return columns.permute(0, 1, 4, 5, 3, 2).flatten(4) - level[:, None, None, None]


def covariance(x: Tensor) -> Tensor:  # [T, n, H, W, K] -> [T, K, K]
    away = x.flatten(1, 3) - x.flatten(1, 3).mean(1, keepdim=True)
    return away.mT @ away / away.shape[1]
