# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Two-dimensional convolutions of all tasks, and their two gradients, each as one matrix product on a GPU.

    conv              patches of x       x  filters            one row for each pixel of the result
    images_gradient   patches of g       x  filters            the same, with the places taken the other way
    filters_gradient  g transposed       x  patches of x       one row for each filter, summed over pixels

Patches are read from the images when they are needed, and never stored. PyTorch's own kernels know no task axis: they
would take a call, and a part of the GPU, for each task. Channels are last in memory: images are [tasks, n, H, W, C]
there, filters [tasks, O, height, width, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.conv4.triton import device
from gradshare.engine.conv4.triton.device import OVERLAPPED, padded_channels, wait
from gradshare.engine.operations import Options


class Tile(NamedTuple):
    """Sizes of a program: rows, columns and depth of a product; warps, and stages of the pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE, MIDDLE, SMALL = Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)
FILTERS = Tile(128, 128, 64, 8, 3)  # of `filters_program`; smaller where there are fewer


@triton.jit
def _places(
    row, column, down, right, height, width, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    ADJOINT: tl.constexpr,
):  # fmt: skip
    """Where in the source the pixel at (row, column) of the target finds its partner at a tap, and whether there."""
    if ADJOINT:
        r, c = row + pad_h - down * dilation_h, column + pad_w - right * dilation_w
        there = (r % stride_h == 0) & (c % stride_w == 0) & (r >= 0) & (c >= 0)
        r, c = r // stride_h, c // stride_w
    else:
        r, c = row * stride_h - pad_h + down * dilation_h, column * stride_w - pad_w + right * dilation_w
        there = (r >= 0) & (c >= 0)
    return r * width + c, there & (r < height) & (c < width)


# Sizes that a program is not compiled again for; the number of channels and the stride are not among them.
ANY = [
    "positions",
    "rows",
    "columns",
    "height",
    "width",
    "taps",
    "taps_w",
    "pad_h",
    "pad_w",
    "dilation_h",
    "dilation_w",
]


@triton.jit(do_not_specialize=ANY)
def patches_program(
    source, filters, target, positions, rows, columns, height, width, sources, targets, taps, taps_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    SOURCES: tl.constexpr, ADJOINT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """target = patches of the source x filters.

    argument           meaning
    source             [tasks, n, height, width, sources]
    filters            [tasks, targets, taps, sources]; with ADJOINT [tasks, sources, taps, targets]
    target             [tasks, n, rows, columns, targets]
    positions          of the target in one task: n rows columns
    taps, taps_w       pixels of a filter, and its width
    SOURCES            the number of sources, if no multiple of BK; else 0
    """
    wait()
    m, task = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(2).to(tl.int64)
    out, within = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    line = m // columns
    image, row, column = line // rows, line % rows, m % columns
    n = positions // (rows * columns)
    if SOURCES:  # known to the compiler, which then loads several channels at a time
        sources = SOURCES
    source += task * n * height * width * sources
    filters += task * targets * taps * sources
    target += task * positions * targets
    start = image * (height * width)
    total = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, taps * sources, BK):
        if SOURCES == 0:  # the whole step is at one tap
            tap = k0 // sources
            channel = k0 - tap * sources + within
            place, there = _places(
                row, column, tap // taps_w, tap % taps_w, height, width,
                stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, ADJOINT,
            )  # fmt: skip
            there = there & (m < positions)
            patch = tl.load(
                source + ((start + place) * sources)[:, None] + channel[None, :], mask=there[:, None], other=0.0
            )
            inside = (out < targets)[None, :]
        else:
            tap, channel = (k0 + within) // SOURCES, (k0 + within) % SOURCES
            place, there = _places(
                row[:, None], column[:, None], (tap // taps_w)[None, :], (tap % taps_w)[None, :], height, width,
                stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, ADJOINT,
            )  # fmt: skip
            there = there & (m < positions)[:, None] & (tap < taps)[None, :]
            patch = tl.load(source + (start[:, None] + place) * sources + channel[None, :], mask=there, other=0.0)
            inside = (out < targets)[None, :] & (tap < taps)[:, None]
        if ADJOINT:
            at = (channel * taps + tap)[:, None] * targets + out[None, :]
        else:
            at = out[None, :] * (taps * sources) + (tap * sources + channel)[:, None]
        total = tl.dot(patch, tl.load(filters + at, mask=inside, other=0.0), total, input_precision=PRECISION)
    to = target + m[:, None] * targets + out[None, :]
    tl.store(to, total.to(target.dtype.element_ty), mask=(m < positions)[:, None] & (out < targets)[None, :])


@triton.jit(do_not_specialize=[*ANY, "chunk", "splits"])
def filters_program(
    source, gradient, target, positions, rows, columns, height, width, sources, targets, taps, taps_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, chunk, splits,
    SOURCES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """target [tasks, splits, targets, taps, sources] = gradients transposed x patches, over a chunk of positions.

    The gradient is [tasks, n, rows, columns, targets]; everything else is as in `patches_program`. SOURCES is 0 if the
    number of sources is a multiple of BN.
    """
    wait()
    out, split = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(2) % splits
    task, k0 = (tl.program_id(2) // splits).to(tl.int64), tl.program_id(1) * BN
    if SOURCES == 0:
        tap = k0 // sources + tl.zeros([BN], tl.int32)
        channel = k0 - k0 // sources * sources + tl.arange(0, BN)
    else:
        tap, channel = (k0 + tl.arange(0, BN)) // SOURCES, (k0 + tl.arange(0, BN)) % SOURCES
    n = positions // (rows * columns)
    if SOURCES:  # known to the compiler, which then loads several channels at a time
        sources = SOURCES
    source += task * n * height * width * sources
    gradient += task * positions * targets
    total = tl.zeros([BM, BN], tl.float32)
    end = tl.minimum(positions, (split + 1) * chunk)
    first = split * chunk + tl.arange(0, BK)
    image, row, column = first // (rows * columns), first // columns % rows, first % columns
    next_image, next_row, next_column = BK // (rows * columns), BK // columns % rows, BK % columns
    for m0 in range(split * chunk, end, BK):
        m, start = m0 + tl.arange(0, BK), image * (height * width)
        if SOURCES == 0:
            place, there = _places(
                row, column, k0 // sources // taps_w, k0 // sources % taps_w, height, width,
                stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, False,
            )  # fmt: skip
            at, there = ((start + place) * sources)[:, None] + channel[None, :], (there & (m < end))[:, None]
        else:
            place, there = _places(
                row[:, None], column[:, None], (tap // taps_w)[None, :], (tap % taps_w)[None, :], height, width,
                stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, False,
            )  # fmt: skip
            at = (start[:, None] + place) * sources + channel[None, :]
            there = there & (m < end)[:, None] & (tap < taps)[None, :]
        patch = tl.load(source + at, mask=there, other=0.0)
        coming = tl.load(
            gradient + m[:, None] * targets + out[None, :],
            mask=(m < end)[:, None] & (out < targets)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(coming), patch, total, input_precision=PRECISION)
        column += next_column  # a step further, without a division
        row += next_row + (column >= columns)
        image += next_image + (row >= rows)
        column -= tl.where(column >= columns, columns, 0)
        row -= tl.where(row >= rows, rows, 0)
    to = (task * splits + split) * targets * taps * sources
    to = target + to + out[:, None] * (taps * sources) + (tap * sources + channel)[None, :]
    tl.store(to, total.to(target.dtype.element_ty), mask=(out < targets)[:, None] & (tap < taps)[None, :])


def conv(x: Tensor, w: Tensor, how: Options, target: Tensor) -> Tensor:
    """Write the convolution of every task; all are [tasks, n, C, H, W] with channels last in memory."""
    return _patches(x, w, how, target, False)


def images_gradient(g: Tensor, w: Tensor, how: Options, target: Tensor) -> Tensor:
    return _patches(g, w, how, target, True)


def _patches(source: Tensor, filters: Tensor, how: Options, target: Tensor, adjoint: bool) -> Tensor:
    tasks, n, targets, rows, columns = target.shape
    sources, (height, width), (taps_h, taps_w) = source.shape[2], source.shape[3:], filters.shape[3:]
    positions = n * rows * columns
    tile = _tile(tasks, positions, targets, target.device)
    depth, regular = _step(sources, taps_h * taps_w, tile.depth)
    grid = (-(-positions // tile.rows), -(-targets // tile.columns), tasks)
    patches_program[grid](
        source, filters, target, positions, rows, columns, height, width, sources, targets, taps_h * taps_w, taps_w,
        *how.stride, *how.padding, *how.dilation,
        SOURCES=0 if regular else sources, ADJOINT=adjoint, BM=tile.rows, BN=tile.columns, BK=depth,
        PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages, **OVERLAPPED,
    )  # fmt: skip
    return target


def filters_gradient(g: Tensor, x: Tensor, how: Options, target: Tensor) -> Tensor:
    tasks, n, targets, rows, columns = g.shape
    sources, (height, width), (taps_h, taps_w) = x.shape[2], x.shape[3:], target.shape[3:]
    positions, depth = n * rows * columns, taps_h * taps_w * sources
    block, regular = _step(sources, taps_h * taps_w, FILTERS.columns)
    tile = FILTERS._replace(rows=min(FILTERS.rows, padded_channels(targets)), columns=block)
    tile = tile._replace(warps=4 if tile.rows * tile.columns <= 64 * 128 else tile.warps)
    groups = -(-targets // tile.rows) * -(-depth // tile.columns) * tasks
    wanted = max(1, min(-(-positions // (4 * tile.depth)), 2 * device.processors(g.device) // groups))  # two at a time
    chunk = -(-positions // (wanted * tile.depth)) * tile.depth
    splits = -(-positions // chunk)
    parts = target if splits == 1 else g.new_empty(tasks, splits, target[0].numel(), dtype=torch.float32)
    filters_program[(-(-targets // tile.rows), -(-depth // tile.columns), tasks * splits)](
        x, g, parts, positions, rows, columns, height, width, sources, targets, taps_h * taps_w, taps_w,
        *how.stride, *how.padding, *how.dilation, chunk, splits,
        SOURCES=0 if regular else sources, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages, **OVERLAPPED,
    )  # fmt: skip
    if splits > 1:
        target.copy_(parts.sum(1).view(tasks, targets, taps_h, taps_w, sources).permute(0, 1, 4, 2, 3))
    return target


def _tile(tasks: int, positions: int, targets: int, place: torch.device) -> Tile:
    """The largest tile with which the tasks fill most of the GPU."""
    for tile in (LARGE, MIDDLE, SMALL):
        programs = -(-positions // tile.rows) * -(-targets // tile.columns) * tasks
        if targets > tile.columns // 2 and 4 * programs >= 3 * device.processors(place):
            return tile
    return SMALL._replace(columns=min(64, padded_channels(targets)))


def _step(sources: int, taps: int, most: int) -> tuple[int, bool]:
    """How many rows of a filter matrix a program takes at a time, and whether they are always of one tap."""
    for step in (128, 64, 32):
        if step <= most and sources % step == 0:
            return step, True
    return min(most, 64, padded_channels(taps * sources)), False
