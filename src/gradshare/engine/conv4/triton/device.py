# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""What all GPU programs and their launches have in common.

A *program* here is a function in Triton (`@triton.jit`); the GPU runs many copies of it, one for each part of the data.
The name of a program that is launched ends in `_program`. The function without that ending takes and returns tensors.

Activations are [tasks, images, height, width, channels]. A *position* is one (image, row, column) of a task. A *window*
is the 2x2 positions that pooling reduces to one. Weights are [tasks, taps * inputs, outputs] in the type of the
activations, and the distance between two tasks is a multiple of 16 elements. Sums, statistics and accumulators are
float32 for every type of activations.

Where the GPU can do it, a program is launched while the previous one still runs, and begins by waiting for its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # two factors of a product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, for tests; do not rely on its bfloat16
DOT: dict[str, str] = {"float32": "ieee", "tf32": "ieee" if INTERPRETED else "tf32", "bf16": "tf32"}
ROUNDED = {"float32": False, "tf32": not INTERPRETED, "bf16": False}  # whether factors are rounded to TF32, see below
# Tiles that were the fastest at T = 1, each tried alone (docs/log.md, 2026-11-16): 16 positions instead of 32 in
# elementwise programs, and 128 rows instead of 64 in convolutions of middling size. False: the sizes before.
SMALL_BATCH_TILES = True
MOST_PARTS = 128  # partial sums that are added at a time


def _all_overlap() -> bool:
    """Whether every GPU here can launch a program before the previous one ends: Hopper and later.

    Triton supports this since about 3.4; we have tried 3.6 and later.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        return False
    gpus = range(0 if INTERPRETED or torch.version.cuda is None else torch.cuda.device_count())
    return len(gpus) > 0 and all(torch.cuda.get_device_capability(gpu) >= (9, 0) for gpu in gpus)


OVERLAPS = tl.constexpr(_all_overlap())
OVERLAPPED = {"launch_pdl": True} if OVERLAPS.value else {}  # an option of every launch


@triton.jit
def wait():
    """The first line of every program: wait until earlier programs have written their results and read their inputs."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def to_tf32(value):
    """The nearest TF32 number, ties away from zero, as float32: 10 bits of mantissa.

    The matrix units cut off the other 13 bits of a float32 factor. So what is a factor later is rounded where it is
    written, which costs no program and no byte. NaN stays NaN: its bits must not overflow.
    """
    bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


@triton.jit
def factor(value, ROUND: tl.constexpr):
    """A float32 value as it is written, if it is a factor of products later."""
    if ROUND:
        return to_tf32(value)
    return value


@triton.jit(do_not_specialize=["size"])
def factors_program(source, target, size, BLOCK: tl.constexpr):
    """target = the source rounded to TF32."""
    wait()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, to_tf32(tl.load(source + place, mask=place < size, other=0.0)), mask=place < size)


def factors(values: Tensor, kind: torch.dtype, rounded: bool) -> Tensor:
    """Float32 values as factors of products: in the type of the activations, or rounded to TF32."""
    if not rounded:
        return values.to(kind)
    values, block = values.contiguous(), 1024
    target = torch.empty_like(values)
    factors_program[(-(-values.numel() // block),)](values, target, values.numel(), BLOCK=block, **OVERLAPPED)
    return target


@triton.jit
def through_activation(gradient, code, slope):
    """Turn a gradient with respect to a block's output into one with respect to the largest element of each window."""
    return tl.where(code >= 4, gradient, gradient * slope)


# Sums that many programs compute together. Each program stores its part, and the last one to finish adds the parts in
# their order. So the result does not depend on which program ran first.


@triton.jit
def last_to_arrive(counter, programs):
    """Whether all other programs of this counter have stored their parts. The counter is then zero again."""
    tl.debug_barrier()  # all stores of this program come before it is counted
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def load_parts(parts, start, programs, tiles, positions, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """Load the parts of programs from `start` on, [PARTS, BN], and the number of positions of each program."""
    part = start + tl.arange(0, PARTS)
    there = part < programs
    place = (part * 2 * BN)[:, None] + tl.arange(0, BN)[None, :]
    left = tl.load(parts + place, mask=there[:, None], other=0.0, cache_modifier=".cg")
    short = tl.where((tiles - 1) % programs == part, tiles * BM - positions, 0)  # the last tile is not full
    had = (tiles - part + programs - 1) // programs * BM - short
    return left, tl.where(there, had, 0).to(tl.float32)[:, None]


@triton.jit
def sum_of_parts(parts, programs, BN: tl.constexpr, PARTS: tl.constexpr):
    """Sum [programs, BN] over programs."""
    total = tl.zeros([BN], tl.float32)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        place = (part * BN)[:, None] + tl.arange(0, BN)[None, :]
        total += tl.sum(tl.load(parts + place, mask=(part < programs)[:, None], other=0.0, cache_modifier=".cg"), 0)
    return total


@triton.jit
def store_means(parts, programs, count, result, C: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """result [2, C] = the sum of [programs, 2, BN] over programs, divided by the count."""
    column = tl.arange(0, 2 * BN)
    mean = sum_of_parts(parts, programs, 2 * BN, PARTS) / count
    tl.store(result + column // BN * C + column % BN, mean, mask=column % BN < C)


class Tile(NamedTuple):
    """Sizes of a program: positions and depth of one product, warps, and stages of the pipeline."""

    positions: int
    depth: int
    warps: int
    stages: int


@cache
def processors(place: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(place).multi_processor_count


@cache
def counters(place: torch.device) -> Tensor:
    """Zeros for `last_to_arrive`. Every program leaves them zero, and programs run one after the other, so all share
    one array."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=place)


def padded_channels(size: int) -> int:
    """The power of two, at least 16, that a program uses for so many channels."""
    return max(16, triton.next_power_of_2(size))


def programs_for(x: Tensor, tiles: int, each: int = 2) -> int:
    """The number of programs for each task with which all tasks together fill the GPU `each` times."""
    return max(1, min(tiles, each * processors(x.device) // len(x)))


def parts_at_a_time(programs: int) -> int:
    return min(triton.next_power_of_2(programs), MOST_PARTS)


def sixteens(weight: Tensor) -> int:
    """The stride between tasks in units of 16 elements."""
    stride = weight.stride(0)
    assert stride % 16 == 0 or len(weight) == 1, "the weights of a task are not padded to a multiple of 16"
    return stride // 16


@cache
def _side_stream(place: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(place)


class SideStream:
    """Runs programs beside the main stream until `join`: a small program leaves most of a GPU idle."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.kept: list[Any] = []

    @contextmanager
    def __call__(self, *used: Any) -> Iterator[None]:
        """Launch on the side stream. Tensors in `used` are kept until `join`, so that their memory is not reused."""
        if INTERPRETED:
            yield
            return
        self.kept += used
        side = _side_stream(self.place)
        side.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(side):
            yield

    def join(self) -> None:
        """Let the main stream wait for the side stream."""
        if not INTERPRETED:
            torch.cuda.current_stream(self.place).wait_stream(_side_stream(self.place))
