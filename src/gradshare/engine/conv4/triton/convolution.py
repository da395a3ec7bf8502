# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Convolutions of the later blocks, and their gradients with respect to images and filters.

A convolution is a matrix product of patches and filters. Patches are read from the images when they are needed, and
never stored. A gradient with respect to filters is a sum over all positions: programs compute parts of it, and one more
program adds the parts of all layers.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.backends import Precision
from gradshare.engine.conv4.triton import device
from gradshare.engine.conv4.triton.device import (
    DOT,
    INTERPRETED,
    OVERLAPPED,
    Pair,
    Tile,
    counters,
    last_to_arrive,
    load_parts,
    padded_channels,
    parts_at_a_time,
    programs_for,
    sixteens,
    store_means,
    through_activation,
    wait,
)


@triton.jit
def _taps(k, SOURCE: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr):
    """Return row offset, column offset and channel of each row k of a filter matrix."""
    channel = k % SOURCE
    tap = k // SOURCE
    if TAPS == 1:
        down, right = tap * 0, tap * 0
    elif FLIP:
        down, right = 1 - tap // 3, 1 - tap % 3
    else:
        down, right = tap // 3 - 1, tap % 3 - 1
    return down, right, channel


@triton.jit
def _patches(source, m, row, column, k, positions, H, W, SOURCE: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr):
    """Load the k-th values of the patches around positions m, [positions, k]; zero outside the image."""
    down, right, channel = _taps(k, SOURCE, TAPS, FLIP)
    there = (m < positions)[:, None] & (k < TAPS * SOURCE)[None, :]
    if TAPS > 1:
        r, c = row[:, None] + down[None, :], column[:, None] + right[None, :]
        there = there & (r >= 0) & (r < H) & (c >= 0) & (c < W)
    place = m[:, None] * SOURCE + ((down * W + right) * SOURCE + channel)[None, :]
    return tl.load(source + place, mask=there, other=0.0)


@triton.jit
def _multiply(
    total, source, weight, m, row, column, positions, H, W,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add patches x filters to `total` [positions, targets]."""
    out = tl.arange(0, BN)
    for k0 in range(0, TAPS * SOURCE, BK):
        k = k0 + tl.arange(0, BK)
        patch = _patches(source, m, row, column, k, positions, H, W, SOURCE, TAPS, FLIP)
        if FLIP:  # [taps, targets, sources]
            place = (out * SOURCE)[:, None] + (k // SOURCE * TARGET * SOURCE + k % SOURCE)[None, :]
            there = (out < TARGET)[:, None] & (k < TAPS * SOURCE)[None, :]
            filters = tl.trans(tl.load(weight + place, mask=there, other=0.0))
        else:  # [taps, sources, targets]
            place = (k * TARGET)[:, None] + out[None, :]
            there = (k < TAPS * SOURCE)[:, None] & (out < TARGET)[None, :]
            filters = tl.load(weight + place, mask=there, other=0.0)
        total = tl.dot(patch, filters, total, input_precision=PRECISION)
    return total


@triton.jit
def _add_to_moments(mean, squares, counted, value, inside, here):
    """Add the `here` rows of a tile to the mean and the sum of squared differences of `counted` rows.

    By Chan's rule, which squares only differences: a large mean costs no digits.
    """
    tile_mean = tl.sum(value, 0) / here
    away = tl.where(inside, value - tile_mean[None, :], 0.0)
    shift = tile_mean - mean
    together = counted + here
    squares += tl.sum(away * away, 0) + shift * shift * (counted * here / together)
    mean += shift * (here / together)
    return mean, squares, together


@triton.jit
def _store_moments(
    parts, programs, tiles, positions, eps, result, task, kept,
    TARGET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the moments of all programs of a task; result [tasks, 2, TARGET] = mean and 1/sqrt(var + eps)."""
    out = tl.arange(0, BN)
    near = tl.load(parts + out, cache_modifier=".cg")  # the first program's mean; all others as differences from it
    top = tl.zeros([BN], tl.float32)
    bottom = tl.zeros([BN], tl.float32)
    for start in range(0, programs, PARTS):
        means, weight = load_parts(parts, start, programs, tiles, positions, BM, BN, PARTS)
        squares, _ = load_parts(parts + BN, start, programs, tiles, positions, BM, BN, PARTS)
        away = means - near[None, :]
        top += tl.sum(away * weight, 0)
        bottom += tl.sum(squares + away * away * weight, 0)
    top /= positions
    variance = tl.maximum(bottom / positions - top * top, 0.0)
    tl.store(result + task * 2 * TARGET + out, near + top, mask=kept)
    tl.store(result + task * 2 * TARGET + TARGET + out, tl.rsqrt(variance + eps), mask=kept)


@triton.jit(do_not_specialize=["positions", "H", "W", "stride_a", "stride_b", "tiles", "count"])
def convolve_program(
    source_a, weight_a, source_b, weight_b, target, z, statistics, code, parts, counter, result,
    positions, H, W, stride_a, stride_b, tiles, count, eps, slope,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr, PAIRS: tl.constexpr,
    SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """target = the convolution of source_a with weight_a (plus that of source_b with weight_b), and sums over it.

    The launch is `convolve` below. Its `sums` chooses the mode:

    SUMS       result [tasks, 2, TARGET], for each channel              reads also
    "none"     nothing
    "moments"  mean and 1/sqrt(var + eps) of the target                 eps
    "means"    mean(q) and mean(q y); q: the target, y: z normalised    z, statistics
    "pooled"   mean(a) and mean(a y); the target is the gradient with   z (the peaks), code, slope, count
               respect to the output of the block below, and a is
               taken back through its activation

    argument              meaning
    source_a, source_b    images [tasks, positions, SOURCE]; only source_a where PAIRS is 1
    weight_a, weight_b    filters [tasks, TAPS * SOURCE, TARGET]; with FLIP [tasks, TAPS * TARGET, SOURCE]
    stride_a, stride_b    elements between two tasks' filters, divided by 16
    target                [tasks, positions, TARGET]
    parts, counter        memory for the sums of each program [tasks, programs, 2, BN], and zeros to count programs
    positions, H, W       positions of a task; height and width of an image
    tiles                 number of tiles of BM positions; a program computes every `programs`-th tile
    count                 number of positions that the means of "pooled" are taken over
    TAPS, FLIP            9 for 3x3 filters or 1; whether to compute the gradient with respect to images instead
    BM, BN, BK, PARTS     sizes of a tile: positions, padded channels, depth of a product; partial sums at a time
    PRECISION             of `tl.dot`
    """
    wait()
    program, programs, task = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    out = tl.arange(0, BN)
    kept = out < TARGET
    source_a += task * positions * SOURCE
    source_b += task * positions * SOURCE
    weight_a += task * stride_a * 16
    weight_b += task * stride_b * 16
    target += task * positions * TARGET
    z += task * positions * TARGET
    if SUMS == "means":
        mean = tl.load(statistics + task * 2 * TARGET + out, mask=kept, other=0.0)
        inverse = tl.load(statistics + task * 2 * TARGET + TARGET + out, mask=kept, other=0.0)
    first = tl.zeros([BN], tl.float32)  # the two sums of this program
    second = tl.zeros([BN], tl.float32)
    counted = 0.0
    for tile in range(program, tiles, programs):
        m = tile * BM + tl.arange(0, BM)
        column, row = m % W, m // W % H
        inside = (m < positions)[:, None] & kept[None, :]
        place = m[:, None] * TARGET + out[None, :]
        if SUMS == "means" or SUMS == "pooled":  # loaded early, so that they have arrived when the product is ready
            other = tl.load(z + place, mask=inside, other=0.0)
        if SUMS == "pooled":
            codes = tl.load(code + task * positions * TARGET + place, mask=inside, other=0)
        total = tl.zeros([BM, BN], tl.float32)
        total = _multiply(
            total, source_a, weight_a, m, row, column, positions, H, W, SOURCE, TARGET, TAPS, FLIP, BN, BK, PRECISION
        )
        if PAIRS == 2:
            total = _multiply(
                total, source_b, weight_b, m, row, column, positions, H, W, SOURCE, TARGET, TAPS, FLIP, BN, BK,
                PRECISION,
            )  # fmt: skip
        rounded = total.to(target.dtype.element_ty)
        tl.store(target + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
        if SUMS == "moments":
            here = tl.minimum(BM, positions - tile * BM).to(tl.float32)
            first, second, counted = _add_to_moments(first, second, counted, value, inside, here)
        elif SUMS == "means":
            y = (other.to(tl.float32) - mean[None, :]) * inverse[None, :]
            first += tl.sum(value, 0)
            second += tl.sum(tl.where(inside, value * y, 0.0), 0)
        elif SUMS == "pooled":
            a = through_activation(value, codes, slope)
            first += tl.sum(a, 0)
            second += tl.sum(a * other.to(tl.float32), 0)
    if SUMS != "none":
        mine = parts + (task * programs + program) * 2 * BN + out
        tl.store(mine, first)
        tl.store(mine + BN, second)
        if last_to_arrive(counter + task, programs):
            parts += task * programs * 2 * BN
            if SUMS == "moments":
                _store_moments(parts, programs, tiles, positions, eps, result, task, kept, TARGET, BM, BN, PARTS)
            else:
                store_means(parts, programs, count, result + task * 2 * TARGET, TARGET, BN, PARTS)


@triton.jit
def _multiply_transposed(total, a, b, PRECISION: tl.constexpr):
    """Return total + a^T b. With "tf32", split float32 into two bfloat16: the GPU cannot transpose TF32 here."""
    if a.dtype == tl.float32 and PRECISION == "tf32":
        high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        low_a, low_b = (a - high_a.to(tl.float32)).to(tl.bfloat16), (b - high_b.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(tl.trans(high_a), high_b, total)
        total = tl.dot(tl.trans(high_a), low_b, total)
        return tl.dot(tl.trans(low_a), high_b, total)
    return tl.dot(tl.trans(a), b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["positions", "H", "W", "chunk"])
def correlate_program(
    source_a, gradient_a, source_b, gradient_b, parts, bias_parts, positions, H, W, chunk,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TAPS: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts [tasks, chunks, taps * sources, targets] = patches^T x gradients, summed over a chunk of positions.

    This is the gradient with respect to the filters. With BIAS also the sum of the first pair's gradients, in
    bias_parts [tasks, chunks, targets].
    """
    wait()
    k = tl.program_id(0) * BR + tl.arange(0, BR)
    split, splits, task = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    out = tl.arange(0, BN)
    source_a += task * positions * SOURCE
    source_b += task * positions * SOURCE
    gradient_a += task * positions * TARGET
    gradient_b += task * positions * TARGET
    total = tl.zeros([BR, BN], tl.float32)
    bias = tl.zeros([BN], tl.float32)
    end = tl.minimum(positions, (split + 1) * chunk)
    for start in range(split * chunk, end, BP):
        m = start + tl.arange(0, BP)
        column, row = m % W, m // W % H
        place = m[:, None] * TARGET + out[None, :]
        inside = (m < end)[:, None] & (out < TARGET)[None, :]
        patch = _patches(source_a, m, row, column, k, end, H, W, SOURCE, TAPS, False)
        value = tl.load(gradient_a + place, mask=inside, other=0.0)
        total = _multiply_transposed(total, patch, value, PRECISION)
        if BIAS:
            bias += tl.sum(value.to(tl.float32), 0)
        if PAIRS == 2:
            patch = _patches(source_b, m, row, column, k, end, H, W, SOURCE, TAPS, False)
            value = tl.load(gradient_b + place, mask=inside, other=0.0)
            total = _multiply_transposed(total, patch, value, PRECISION)
    there = (k < TAPS * SOURCE)[:, None] & (out < TARGET)[None, :]
    to = (task * splits + split) * (TAPS * SOURCE * TARGET) + (k * TARGET)[:, None] + out[None, :]
    tl.store(parts + to, total, mask=there)
    if BIAS:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(bias_parts + (task * splits + split) * TARGET + out, bias, mask=out < TARGET)


@triton.jit(do_not_specialize=["size"])
def add_parts_program(parts, table, target, size, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """target [tasks, size] = sums of parts, and zero where there are no parts.

    A row of `table` [programs, 6] says for one program: where its first part starts, the number of parts, their size,
    where the sum goes, how many elements are summed, and how many elements are written.
    """
    wait()
    row, task = table + tl.program_id(0) * 6, tl.program_id(1).to(tl.int64)
    start, count, stride = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    to, wanted, filled = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    element = tl.arange(0, BLOCK)
    parts += start + task * count * stride
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, MOST):
        part = first + tl.arange(0, MOST)
        there = (part < count)[:, None] & (element < wanted)[None, :]
        total += tl.sum(tl.load(parts + part[:, None] * stride + element[None, :], mask=there, other=0.0), 0)
    tl.store(target + task * size + to + element, total, mask=element < filled)


class Sums(NamedTuple):
    """What a convolution also sums over its result; `convolve_program` has the formulas."""

    kind: Literal["none", "moments", "means", "pooled"] = "none"
    z: Tensor | None = None
    statistics: Tensor | None = None
    code: Tensor | None = None
    over: int = 0  # positions that a mean is taken over; 0: those of the result
    eps: float = 0.0
    slope: float = 0.0

    @staticmethod
    def moments(eps: float) -> Sums:
        """Mean and 1/sqrt(var + eps) of every channel."""
        return Sums("moments", eps=eps)

    @staticmethod
    def means(z: Tensor, statistics: Tensor) -> Sums:
        """mean(q) and mean(q y) of the result q, with y the normalised z."""
        return Sums("means", z, statistics)

    @staticmethod
    def pooled(peak: Tensor, code: Tensor, positions: int, slope: float) -> Sums:
        """mean(a) and mean(a y), where the result is the gradient with respect to the output of the block below.

        `peak` and `code` are results of that block, and `positions` its number of positions before pooling.
        """
        return Sums("pooled", peak, code=code, over=positions, slope=slope)


def _tile(x: Tensor, positions: int) -> Tile:
    """Use large tiles, unless they would be too few to fill the GPU."""
    if INTERPRETED:
        return Tile(64, 32, 4, 1)
    processors, depth = device.processors(x.device), 128 // x.element_size()
    if len(x) * -(-positions // 128) >= processors:
        return Tile(128, depth // 2, 4, 4)
    if len(x) * -(-positions // 64) >= processors:
        return Tile(128 if device.SMALL_BATCH_TILES else 64, depth, 4, 3)
    return Tile(32, depth, 4, 3)


def convolve(
    pairs: list[Pair],  # [tasks, n, H, W, C] images and [tasks, taps * C, O] weights (O, C swapped where adjoint)
    channels: int,  # of the result
    taps: int,
    precision: Precision,
    adjoint: bool = False,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each pair and add the results. With `adjoint`, use the gradients with respect to the images instead.

    Returns the result [tasks, n, H, W, channels] and its sums [tasks, 2, channels].
    """
    (a, weight_a), (b, weight_b) = pairs[0], pairs[-1]
    tasks, n, height, width, source = a.shape
    positions = n * height * width
    target = a.new_empty(tasks, n, height, width, channels)
    tile = _tile(a, positions)
    tiles = -(-positions // tile.positions)
    programs = programs_for(a, tiles) if sums else tiles
    block = padded_channels(channels)
    parts = a.new_empty(tasks, programs if sums else 0, 2, block, dtype=torch.float32)
    result = a.new_empty(tasks, 2, channels, dtype=torch.float32)
    sums = sums or Sums()
    convolve_program[(programs, tasks)](
        a, weight_a, b, weight_b, target, target if sums.z is None else sums.z,
        result if sums.statistics is None else sums.statistics, target if sums.code is None else sums.code,
        parts, counters(a.device), result,
        positions, height, width, sixteens(weight_a), sixteens(weight_b), tiles, sums.over or positions, sums.eps,
        sums.slope,
        SOURCE=source, TARGET=channels, TAPS=taps, FLIP=adjoint, PAIRS=len(pairs), SUMS=sums.kind,
        BM=tile.positions, BN=block, BK=min(tile.depth, padded_channels(taps * source)),
        PARTS=parts_at_a_time(programs) if sums.kind != "none" else 1, PRECISION=DOT[precision],
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAPPED,
    )  # fmt: skip
    return target, result


SUMMED = Tile(positions=128, depth=32, warps=4, stages=0)  # of `add_parts_program`: elements and parts at a time
CORRELATION = {  # of `correlate_program`: rows of the result, and positions at a time
    "float32": Tile(64, 32, 4, 2),
    "tf32": Tile(64, 32, 4, 3),
    "bf16": Tile(64, 64, 4, 3),
}


def splits(tasks: int, positions: int, rows: int, precision: Precision, place: torch.device) -> tuple[int, int]:
    """Return the number of parts in which `correlate` sums, and the number of positions of each part."""
    tile = CORRELATION[precision]
    groups = -(-rows // min(tile.positions, padded_channels(rows)))
    share = -(-3 * device.processors(place) // (tasks * groups))
    wanted = max(1, min(-(-positions // (2 * tile.depth)), share))
    chunk = -(-positions // (wanted * tile.depth)) * tile.depth
    return -(-positions // chunk), chunk


def correlate(
    pairs: list[Pair],  # [tasks, n, H, W, C] images and [tasks, n, H, W, O] gradients
    taps: int,
    precision: Precision,
    target: Tensor,  # the parts are written here, [tasks * parts * taps * C * O]
    parts: tuple[int, int],  # from `splits`
    bias_target: Tensor | None = None,  # [tasks * parts * O]
) -> None:
    """Write parts of the gradient with respect to the filters, [tasks, parts, taps * C, O], summed over the pairs.

    With `bias_target`, also parts of the gradient with respect to a bias: the sum of the first pair's gradients.
    """
    (a, gradient_a), (b, gradient_b) = pairs[0], pairs[-1]
    tasks, n, height, width, source = a.shape
    channels = gradient_a.shape[-1]
    tile = CORRELATION[precision]
    rows = min(tile.positions, padded_channels(taps * source))
    count, chunk = parts
    correlate_program[(-(-taps * source // rows), count, tasks)](
        a, gradient_a, b, gradient_b, target, target if bias_target is None else bias_target,
        n * height * width, height, width, chunk,
        SOURCE=source, TARGET=channels, TAPS=taps, PAIRS=len(pairs), BIAS=bias_target is not None,
        BR=rows, BN=padded_channels(channels), BP=tile.depth,
        PRECISION=DOT[precision], num_warps=4 if rows < 128 else tile.warps, num_stages=tile.stages, **OVERLAPPED,
    )  # fmt: skip


class PartialSums(NamedTuple):
    """Where the parts of several sums are in one buffer, and how they are added into one vector [tasks, size]."""

    tasks: int
    size: int
    elements: int  # of the buffer
    slices: tuple[slice, ...]  # of each sum, in the buffer
    table: Tensor  # see `add_parts_program`

    def buffer(self) -> Tensor:
        return torch.empty(self.elements, dtype=torch.float32, device=self.table.device)

    def add(self, buffer: Tensor) -> Tensor:  # [tasks, size]
        """Add the parts of all sums at once. Elements without parts are zero."""
        target = torch.empty(self.tasks, self.size, dtype=torch.float32, device=buffer.device)
        add_parts_program[(len(self.table), self.tasks)](
            buffer, self.table, target, self.size,
            BLOCK=SUMMED.positions, MOST=SUMMED.depth, num_warps=SUMMED.warps, **OVERLAPPED,
        )  # fmt: skip
        return target


@cache
def partial_sums(
    sums: tuple[tuple[int, int, int], ...],  # offset in the vector, parts, elements of each; in the vector's order
    tasks: int,
    size: int,
    place: torch.device,
) -> PartialSums:
    """Plan the buffer and the table of `add_parts_program`."""
    rows: list[tuple[int, ...]] = []
    slices, used, done = [], 0, 0
    for offset, parts, elements in (*sums, (size, 0, 0)):
        for at in range(done, offset, SUMMED.positions):  # nothing is summed here
            rows.append((0, 0, 0, at, 0, min(SUMMED.positions, offset - at)))
        for at in range(0, elements, SUMMED.positions):
            here = min(SUMMED.positions, elements - at)
            rows.append((used + at, parts, elements, offset + at, here, here))
        slices.append(slice(used, used + tasks * parts * elements))
        used, done = used + tasks * parts * elements, offset + elements
    return PartialSums(tasks, size, used, tuple(slices[:-1]), torch.tensor(rows, dtype=torch.int32).to(place))
