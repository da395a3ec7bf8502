"""Convolutions of many tasks, each with its own filters, as three operators that a compiler can place.

    conv(x, w)      images_gradient(g, x, w)      filters_gradient(g, x, w)

Images are [tasks, n, C, ...], filters [tasks, O, C/groups, ...]. A 2-D result has its channels last in memory, as the
kernels of bf16 and TF32 want it. `TaskMaps` gives them derivatives of every order (`operations.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradshare.engine.backends import not_installed
from gradshare.engine.operations import Options, conv_backward
from gradshare.errors import UserError

aten = torch.ops.aten

# Whether the programs of `implicit.py` compute what they can.
AT_ONCE = True
# On how many streams a GPU computes the tasks of a convolution, one call of PyTorch's for each task: those of a few
# images leave most of a GPU idle.
STREAMS = 4

library = torch.library.Library("gradshare", "DEF")
OPTIONS = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
for name, tensors in (
    ("conv", "Tensor x, Tensor w"),
    ("images_gradient", "Tensor g, Tensor x, Tensor w"),
    ("filters_gradient", "Tensor g, Tensor x, Tensor w"),
):
    library.define(f"{name}({tensors}, {OPTIONS}) -> Tensor")
operators = torch.ops.gradshare


class TaskMaps(Options):
    """A convolution of many tasks and its gradients, by the operators of this module."""

    def conv(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return operators.conv(laid_out(x), laid_out(w), *self)

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, to_x: bool, to_w: bool) -> tuple[Tensor, Tensor]:
        g, x, w = laid_out(g), laid_out(x), laid_out(w)
        images = operators.images_gradient(g, x, w, *self) if to_x else x
        return images, operators.filters_gradient(g, x, w, *self) if to_w else w


def laid_out(x: Tensor) -> Tensor:  # [tasks, n, C, ...]
    """The same values in the order in memory that the operators take and return: channels last where there are two
    dimensions of pixels."""
    if x.dim() != 5:
        return x.contiguous()
    last = x.permute(0, 1, 3, 4, 2)
    return x if last.is_contiguous() else last.contiguous().permute(0, 1, 4, 2, 3)


def _like(x: Tensor, shape: Iterable[int]) -> Tensor:
    tasks, n, channels, *size = shape
    if len(size) != 2:
        return x.new_empty(tasks, n, channels, *size)
    return x.new_empty(tasks, n, *size, channels).permute(0, 1, 4, 2, 3)


def _shape(x: Tensor, w: Tensor, options: Options) -> list[int]:
    """The shape of a convolution's result."""
    size = []
    places = zip(x.shape[3:], w.shape[3:], *options[:3], options.output_padding, strict=True)
    for pixels, width, stride, padding, dilation, more in places:
        if options.transposed:
            size.append((pixels - 1) * stride - 2 * padding + dilation * (width - 1) + more + 1)
        else:
            size.append((pixels + 2 * padding - dilation * (width - 1) - 1) // stride + 1)
    channels = w.shape[2] * options.groups if options.transposed else w.shape[1]
    if x.shape[2] != (w.shape[1] if options.transposed else w.shape[2] * options.groups) or min(size, default=1) < 1:
        raise UserError(f"a convolution with filters {list(w.shape[1:])} cannot take images {list(x.shape[2:])}")
    return [x.shape[0], x.shape[1], channels, *size]


def _fake_conv(x: Tensor, w: Tensor, *options: Any) -> Tensor:
    return _like(x, _shape(x, w, Options(*options)))


def _fake_images_gradient(g: Tensor, x: Tensor, w: Tensor, *options: Any) -> Tensor:
    return _like(x, x.shape)


def _fake_filters_gradient(g: Tensor, x: Tensor, w: Tensor, *options: Any) -> Tensor:
    return _like(w, w.shape)


def _conv(x: Tensor, w: Tensor, *options: Any) -> Tensor:
    how = Options(*options)
    if _is_product(w, how):
        return _product(x, w.flatten(2).mT)
    if _at_once(x, how):
        from gradshare.engine import implicit

        return implicit.conv(x, w, how, _fake_conv(x, w, *options))
    return _by_task(lambda x, w: aten.convolution(x, w, None, *how), x, w)


def _images_gradient(g: Tensor, x: Tensor, w: Tensor, *options: Any) -> Tensor:
    how = Options(*options)
    if _is_product(w, how):
        return _product(g, w.flatten(2))
    if _at_once(x, how):
        from gradshare.engine import implicit

        return implicit.images_gradient(g, w, how, _like(x, x.shape))
    return _by_task(lambda g, x, w: conv_backward(g, x, w, how, [True, False, False])[0], g, x, w)


def _filters_gradient(g: Tensor, x: Tensor, w: Tensor, *options: Any) -> Tensor:
    how = Options(*options)
    if _at_once(x, how):
        from gradshare.engine import implicit

        return implicit.filters_gradient(g, x, how, _like(w, w.shape))
    return _by_task(lambda g, x, w: conv_backward(g, x, w, how, [False, True, False])[1], g, x, w)


def _at_once(x: Tensor, how: Options) -> bool:
    """Whether our GPU programs compute all tasks at once; PyTorch's know no task axis."""
    plain = x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 5 and not how.transposed and how.groups == 1
    return AT_ONCE and plain and len(x) > 1 and not_installed() is None


def _is_product(w: Tensor, how: Options) -> bool:
    """Whether a convolution is one product of matrices for each task: filters of one pixel, images with channels last.

    The gradient with respect to the filters is not: a library's product of so many rows is slow.
    """
    return w.shape[3:] == (1, 1) and how == Options([1, 1], [0, 0], how.dilation, False, how.output_padding, 1)


def _product(x: Tensor, w: Tensor) -> Tensor:  # [tasks, n, C, H, W], [tasks, C, O] -> [tasks, n, O, H, W]
    last = x.movedim(2, -1)
    return torch.bmm(last.flatten(1, 3), w).unflatten(1, last.shape[1:4]).movedim(-1, 2)


def _by_task(one: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call a function for each task, and join what it returns in one copy, laid out."""
    results = []
    for place, task in zip(_places(tensors[0]), zip(*tensors, strict=True), strict=True):
        with place:
            results.append(one(*task))
    if len(results) == 1:
        return laid_out(results[0][None])
    if results[0].dim() != 4:
        return torch.stack(results)
    return torch.stack([result.movedim(1, -1) for result in results]).movedim(-1, 2)


def _places(x: Tensor) -> Iterator[AbstractContextManager[Any]]:
    """Where to compute each task: here, or in turn on several streams of a GPU, which are joined at the end."""
    if STREAMS == 1 or not x.is_cuda or len(x) == 1:
        yield from itertools.repeat(nullcontext(), len(x))
        return
    here = torch.cuda.current_stream()
    aside = _streams(x.device, STREAMS)[: len(x)]
    for stream in aside:
        stream.wait_stream(here)
    yield from itertools.islice(itertools.cycle(torch.cuda.stream(stream) for stream in aside), len(x))
    for stream in aside:
        here.wait_stream(stream)


@cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]


for name, compute, stand_in in (
    ("conv", _conv, _fake_conv),
    ("images_gradient", _images_gradient, _fake_images_gradient),
    ("filters_gradient", _filters_gradient, _fake_filters_gradient),
):
    library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradshare::{name}", stand_in, lib=library)
