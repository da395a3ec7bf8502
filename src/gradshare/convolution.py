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


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return aten.convolution(x, w, b, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_b, _ = ctx.needs_input_grad
        return (
            _TowardsImages.apply(g, w, x.detach(), ctx.geometry) if to_x else None,
            _TowardsFilters.apply(g, x, w.detach(), ctx.geometry) if to_w else None,
            g.sum((0, *range(2, g.dim()))) if to_b else None,
            None,
        )


class _TowardsImages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, x: Tensor, geometry: Geometry) -> Tensor:  # x: its shape only
        ctx.save_for_backward(g, w)
        ctx.geometry = geometry
        return aten.convolution_backward(g, x, w, None, *geometry, [True, False, False])[0]

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        to_g, to_w, _, _ = ctx.needs_input_grad
        return (
            _Conv.apply(v, w, None, ctx.geometry) if to_g else None,
            _TowardsFilters.apply(g, v, w.detach(), ctx.geometry) if to_w else None,
            None,
            None,
        )


class _TowardsFilters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:  # w: its shape only
        ctx.save_for_backward(g, x)
        ctx.geometry = geometry
        return aten.convolution_backward(g, x, w, None, *geometry, [False, True, False])[1]

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, x = ctx.saved_tensors
        to_g, to_x, _, _ = ctx.needs_input_grad
        return (
            _Conv.apply(x, v, None, ctx.geometry) if to_g else None,
            _TowardsImages.apply(g, v, x.detach(), ctx.geometry) if to_x else None,
            None,
            None,
        )
