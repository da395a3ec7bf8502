"""Convolution, batch norm and max pooling whose derivatives of every order that is needed are right and fast.

**Convolution.** A convolution is bilinear in images and filters. Its two gradients are bilinear too, and the gradients
of those are the same three maps again:

    y = conv(x, w)      x' = images_gradient(y', w)      w' = filters_gradient(x, y')

So every order of derivative runs on PyTorch's fast kernels. PyTorch's own second derivative does not: it uses whole
images as filters, which is several times slower.

**Batch norm.** In plain operations its derivatives take dozens of passes over the activations. Here the value and the
first derivative are PyTorch's fused kernels, and the second derivative is written in terms of the first. For one
channel with N elements let y = (x - mean(x)) / s and s = sqrt(var(x) + eps). The derivative of y, applied to z, is

    P(z) = (z - mean(z) - y mean(z y)) / s           (a symmetric map)

Batch norm is w y + b. Its first derivative maps g to (x', w', b') = (w P(g), sum(g y), sum(g)). The derivative of that
map, applied to (v, vw, vb), is

    with respect to g:  w P(v) + vw y + vb
    with respect to w:  R = sum(g P(v))
    with respect to x:  -y w R / (N s) - P(v) w mean(g y) / s + P(g) (vw - w mean(v y) / s)

**Max pooling.** On a CPU, 2x2 pooling of images with channels first is much faster here than in PyTorch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.errors import UserError

aten = torch.ops.aten


class Options(NamedTuple):
    """The options of a convolution, in the order in which PyTorch's operators take them."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class Maps(Protocol):
    """A convolution and its two gradients, by some kernels; every order of derivative is made of the two functions."""

    def conv(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Convolve images with filters."""

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, to_x: bool, to_w: bool) -> tuple[Tensor, Tensor]:
        """Those with respect to images and filters, as far as they are wanted."""


class Geometry(Options):
    """The same, computed by PyTorch's kernels."""

    def conv(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return aten.convolution(plain_strides(x), plain_strides(w), b, *self)

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, to_x: bool, to_w: bool) -> tuple[Tensor, Tensor]:
        return conv_backward(g, x, w, self, [to_x, to_w, False])[:2]  # type: ignore[return-value]


def conv(
    x: Tensor,  # [n, C, ...]
    w: Tensor,  # [O, C/groups, ...], or transposed [C, O/groups, ...]
    b: Tensor | None,  # [O]
    geometry: Maps,
) -> Tensor:  # [n, O, ...]
    """Convolve images with filters; differentiable to any order."""
    return _Conv.apply(x, w, b, geometry)


def plain_strides(x: Tensor) -> Tensor:
    """Return the same tensor with standard strides in dimensions of size one.

    Those strides have no meaning, but some of PyTorch's kernels read them and then return wrong values.
    """
    if 1 not in x.shape:
        return x
    order = list(range(x.dim()))
    if not x.is_contiguous():
        if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
            return x
        order = [0, 2, 3, 1]
    strides, step = [0] * x.dim(), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= x.shape[dimension]
    return x.as_strided(x.shape, strides)


def conv_backward(g: Tensor, x: Tensor, w: Tensor, geometry: Options, wanted: list[bool]) -> tuple[Tensor, ...]:
    """Return the gradients with respect to images, filters and bias, from PyTorch's kernels."""
    if len(w) == 1:  # with one filter in float64, PyTorch raises an error for channels last
        g, x, w = g.contiguous(), x.contiguous(), w.contiguous()
    return aten.convolution_backward(plain_strides(g), plain_strides(x), plain_strides(w), None, *geometry, wanted)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Maps) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return geometry.conv(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_w, to_b, _ = ctx.needs_input_grad
        x, w = ctx.saved_tensors
        images, filters = _gradients(g, x, w, ctx.geometry, to_x, to_w)
        return images, filters, g.sum((0, *range(2, g.dim()))) if to_b else None, None


def _gradients(
    g: Tensor, x: Tensor, w: Tensor, geometry: Maps, to_x: bool, to_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients with respect to images and filters, as far as they are wanted; differentiable to any order."""
    if not (to_x or to_w):
        return None, None
    # Without the gradient with respect to the other factor, just the shape of a factor is used.
    return _Gradients.apply(g, x if to_w else x.detach(), w if to_x else w.detach(), geometry, to_x, to_w)


class _Gradients(torch.autograd.Function):
    """Both gradients in one call of PyTorch's kernel, because most callers need both."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor, geometry: Maps, to_x: bool, to_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(g, x, w)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        images, filters = geometry.gradients(g, x, w, to_x, to_w)
        return images if to_x else None, filters if to_w else None

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, u: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, w = ctx.saved_tensors
        to_g, to_x, to_w, *_ = ctx.needs_input_grad
        of_g: list[Tensor] = []  # what the two contribute to the derivative with respect to g
        of_x = of_w = None
        if v is not None:
            of_g += [_Conv.apply(v, w, None, ctx.geometry)] if to_g else []
            _, of_w = _gradients(g, v, w, ctx.geometry, False, to_w)
        if u is not None:
            if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
                u = u.contiguous(memory_format=torch.channels_last)  # once, or each of the two calls would convert
            of_g += [_Conv.apply(x, u, None, ctx.geometry)] if to_g else []
            of_x, _ = _gradients(g, x, u, ctx.geometry, to_x, False)
        return sum(of_g[1:], of_g[0]) if of_g else None, of_x, of_w, None, None, None


def batch_norm(
    x: Tensor,  # [n, C, ...]
    gain: Tensor,  # [C]
    bias: Tensor,  # [C]
    eps: float,
) -> Tensor:  # [n, C, ...]
    """Normalise every channel with the statistics of this batch; twice differentiable."""
    if x.numel() == x.shape[1]:
        raise UserError(one_value(list(x.shape[2:])))
    return _BatchNorm.apply(x, gain, bias, eps)[0]


def one_value(size: list[int]) -> str:
    return (
        "batch norm uses the statistics of the batch, so it needs more than 1 value per channel;"
        f" here a task has one example of size {size}: give each task more examples"
    )


def _batch_norm_backward(g: Tensor, x: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Any:
    """Return (w P(g), sum(g y), sum(g))."""
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
        return *_BatchNormGradient.apply(g, *ctx.saved_tensors, ctx.eps), None


class _BatchNormGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Any:
        ctx.save_for_backward(g, x, gain, mean, inverse)
        ctx.eps = eps
        return _batch_norm_backward(g, x, gain, mean, inverse, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, v_gain: Tensor, v_bias: Tensor) -> tuple[Tensor | None, ...]:
        g, x, gain, mean, inverse = ctx.saved_tensors
        one = torch.ones_like(gain)
        p_v, sum_vy, _ = _batch_norm_backward(v, x, one, mean, inverse, ctx.eps)
        p_g, sum_gy, _ = _batch_norm_backward(g, x, one, mean, inverse, ctx.eps)
        r = (g * p_v).sum((0, *range(2, x.dim())))
        count = x.numel() / x.shape[1]

        def column(values: Tensor) -> Tensor:  # [C] -> [1, C, 1, ...]
            return values.view(1, -1, *(1 for _ in range(2, x.dim())))

        # y = x * inverse - mean * inverse, so y's coefficient becomes one of x and a constant: y is never computed
        to_g = column(gain) * p_v + column(v_gain * inverse) * x + column(v_bias - v_gain * inverse * mean)
        of_x = -gain * r * inverse.square() / count
        to_x = (
            column(of_x) * x
            - column(of_x * mean)
            - column(gain * inverse * sum_gy / count) * p_v
            + column(v_gain - gain * inverse * sum_vy / count) * p_g
        )
        return to_g, to_x, r, None, None, None


WINDOW = ([2, 2], [2, 2], [0, 0], [1, 1], False)  # 2x2 pooling: size, stride, padding, dilation, ceil_mode


def max_pool(x: Tensor) -> Tensor:  # [n, C, H, W] -> [n, C, H/2, W/2]
    """Pool 2x2 windows on a CPU; an odd last row or column belongs to no window. Differentiable to any order."""
    return _MaxPool.apply(x)


class _MaxPool(torch.autograd.Function):
    """Compares left with right, then the larger of the upper row with the larger of the lower row.

    Each comparison gives 1 where its second element is larger and 0 elsewhere, in floating point: selecting with
    Booleans is slower. Of equal elements the first counts, as in PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, columns = (size // 2 for size in x.shape[-2:])
        upper_left, upper_right, lower_left, lower_right = (
            x[..., row : 2 * rows : 2, column : 2 * columns : 2] for row in (0, 1) for column in (0, 1)
        )
        upper, lower = torch.maximum(upper_left, upper_right), torch.maximum(lower_left, lower_right)
        top = torch.maximum(upper, lower)
        in_row = torch.sub(top, upper).sign_()
        right = torch.lerp((upper - upper_left).sign_(), (lower - lower_left).sign_(), in_row)
        width = x.shape[-1]
        corners = torch.arange(rows).unsqueeze(1) * (2 * width) + torch.arange(columns) * 2
        ctx.save_for_backward(right.add_(in_row, alpha=width).long().add_(corners))
        ctx.shape = x.shape
        return top

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        like = g.new_empty(()).expand(ctx.shape)  # only its shape is used
        return aten.max_pool2d_with_indices_backward(g.contiguous(), like, *WINDOW, places)
