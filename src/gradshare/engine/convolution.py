"""Convolutions closed under differentiation.

A convolution is bilinear in images and filters. Its two derivatives (towards the images, towards the filters) are
bilinear again, and the derivatives of those are the same three maps:

    y = conv(x, w)      x' = towards_images(y', w)      w' = towards_filters(x, y')

So every order of derivative runs on the library's fast kernels. PyTorch's own double backward does not: it uses whole
images as kernels, which is several times slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Geometry(NamedTuple):
    """Everything about a convolution but its images and filters, in the order that aten's operators take it."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def conv(
    x: Tensor,  # [n, C, ...]
    w: Tensor,  # [O, C/groups, ...], or transposed [C, O/groups, ...]
    b: Tensor | None,  # [O]
    geometry: Geometry,
) -> Tensor:  # [n, O, ...]
    """Convolve images with filters."""
    return _Conv.apply(x, w, b, geometry)


def plain_strides(x: Tensor) -> Tensor:
    """The same tensor, with the usual strides where a dimension of size one has others.

    Those strides are never used, but some of PyTorch's kernels look at them, and give wrong values.
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


def conv_backward(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, wanted: list[bool]) -> tuple[Tensor, ...]:
    """The gradients towards images, filters and bias, by PyTorch's kernels."""
    if len(w) == 1:  # one filter: in float64 PyTorch refuses channels last
        g, x, w = g.contiguous(), x.contiguous(), w.contiguous()
    return aten.convolution_backward(plain_strides(g), plain_strides(x), plain_strides(w), None, *geometry, wanted)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return aten.convolution(plain_strides(x), plain_strides(w), b, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_b, _ = ctx.needs_input_grad
        images = filters = None
        if to_x and to_w:
            images, filters = _TowardsBoth.apply(g, x, w, ctx.geometry)
        elif to_x:
            images = _TowardsImages.apply(g, w, x.detach(), ctx.geometry)
        elif to_w:
            filters = _TowardsFilters.apply(g, x, w.detach(), ctx.geometry)
        return images, filters, g.sum((0, *range(2, g.dim()))) if to_b else None, None


class _TowardsBoth(torch.autograd.Function):
    """`towards_images` and `towards_filters` in one, because they mostly come together."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(g, x, w)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        images, filters, _ = conv_backward(g, x, w, geometry, [True, True, False])
        return images, filters

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, u: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, w = ctx.saved_tensors
        by_v: tuple[Tensor | None, ...] = (None, None)
        by_u: tuple[Tensor | None, ...] = (None, None)
        to_g, to_x, to_w, _ = ctx.needs_input_grad
        if v is not None:
            by_v = _derivative_of_images(v, g, w, ctx.geometry, to_g, to_w)
        if u is not None:
            by_u = _derivative_of_filters(u, g, x, ctx.geometry, to_g, to_x)
        both = by_v[0] + by_u[0] if by_v[0] is not None and by_u[0] is not None else None
        one = by_v[0] if by_u[0] is None else by_u[0]
        return one if both is None else both, by_u[1], by_v[1], None


def _derivative_of_images(
    v: Tensor, g: Tensor, w: Tensor, geometry: Geometry, to_g: bool, to_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (
        _Conv.apply(v, w, None, geometry) if to_g else None,
        _TowardsFilters.apply(g, v, w.detach(), geometry) if to_w else None,
    )


def _derivative_of_filters(
    v: Tensor, g: Tensor, x: Tensor, geometry: Geometry, to_g: bool, to_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        v = v.contiguous(memory_format=torch.channels_last)  # else both lines below would do so
    return (
        _Conv.apply(x, v, None, geometry) if to_g else None,
        _TowardsImages.apply(g, v, x.detach(), geometry) if to_x else None,
    )


class _TowardsImages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, x: Tensor, geometry: Geometry) -> Tensor:  # x: its shape only
        ctx.save_for_backward(g, w)
        ctx.geometry = geometry
        return conv_backward(g, x, w, geometry, [True, False, False])[0]

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        to_g, to_w, _, _ = ctx.needs_input_grad
        return *_derivative_of_images(v, g, w, ctx.geometry, to_g, to_w), None, None


class _TowardsFilters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:  # w: its shape only
        ctx.save_for_backward(g, x)
        ctx.geometry = geometry
        return conv_backward(g, x, w, geometry, [False, True, False])[1]

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, x = ctx.saved_tensors
        to_g, to_x, _, _ = ctx.needs_input_grad
        return *_derivative_of_filters(v, g, x, ctx.geometry, to_g, to_x), None, None
