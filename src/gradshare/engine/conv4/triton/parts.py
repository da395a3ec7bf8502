# mypy: ignore-errors
"""Sums that many programs take together, in Triton.

Each program leaves its part, and the last one to arrive adds the parts up in their order. So results do not depend on
which program ran first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _last_to_arrive(counter, programs):
    """Whether all other programs of this counter have stored their parts; the counter is zero again afterwards."""
    tl.debug_barrier()  # all stores of this program come before its arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _parts(parts, start, programs, tiles, positions, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """What programs left, from `start` on, [PARTS, BN]; and how many positions each of them had."""
    part = start + tl.arange(0, PARTS)
    there = part < programs
    place = (part * 2 * BN)[:, None] + tl.arange(0, BN)[None, :]
    left = tl.load(parts + place, mask=there[:, None], other=0.0, cache_modifier=".cg")
    short = tl.where((tiles - 1) % programs == part, tiles * BM - positions, 0)  # the last tile is not full
    had = (tiles - part + programs - 1) // programs * BM - short
    return left, tl.where(there, had, 0).to(tl.float32)[:, None]


@triton.jit
def _sum_of_parts(parts, programs, BN: tl.constexpr, PARTS: tl.constexpr):
    """The sum of [programs, BN] over its rows."""
    total = tl.zeros([BN], tl.float32)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        place = (part * BN)[:, None] + tl.arange(0, BN)[None, :]
        total += tl.sum(tl.load(parts + place, mask=(part < programs)[:, None], other=0.0, cache_modifier=".cg"), 0)
    return total


@triton.jit
def _store_means(parts, programs, count, result, C: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """result [2, C] = the sum of [programs, 2, BN] over programs, by the count."""
    column = tl.arange(0, 2 * BN)
    mean = _sum_of_parts(parts, programs, 2 * BN, PARTS) / count
    tl.store(result + column // BN * C + column % BN, mean, mask=column % BN < C)
