"""The least time of a meta-iteration: its operations and bytes, and what the machine can do (a roofline model).

**Operations** are counted from the shapes. A convolution and its two gradients (with respect to images and to filters)
are bilinear maps of the same cost, 2 x 9 x inputs x outputs for each position: one unit. The head is the same with one
position and one tap.

    inner step    forward 1, its gradient 2, and the outer derivative of these three maps 2 each: 9 units
    query         forward 1, and the outer derivative 2: 3 units

The first layer's images need no derivative. There an inner step is 4 units (forward 1, gradient 1, one derivative of
each) and a query 2. Everything except convolutions and head is left out: a few per cent of the operations.

**Bytes** are those of one program for each map, and one for batch norm, pooling and activation together (and one each
for its first and second derivative). A program reads its inputs once and writes its result once. Two maps whose results
are added write once. Batch norm needs statistics of the whole batch, so the convolution's result is written and read
again. `a` are a layer's inputs, `z` the results of its convolution, `p` the pooled results (the next layer's `a`):

                                            reads                      writes
    forward      convolution                a                          z
                 norm, pool, activation     z                          p
    gradient     of norm, pool, activation  z, p'                      z'
                 of filters                 a, z'
                 of images                  z'                         a'
    outer        of the images' gradient    va', and z', va'           vz'  (with the next)
                 of the filters' gradient   a, z'
                 of the gradient of norm    z, p', vz'                 vp', vz
                 of norm, pool, activation  z, vp, vz                  vz
                 of the convolution         a, vz, and vz              va

Weights and their gradients are left out (below 1 %). We assume that a cache keeps nothing from one program to the next.
On a GPU with large images that is almost true; on a CPU with small images the real traffic to memory is lower.

**Ceilings** are measured: the bandwidth of a large copy and the rate of a large matrix product, on random data.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gradshare.bench.cases import Case, Precision, precision_in_pytorch


class Layer(NamedTuple):
    """One layer and one image: numbers of inputs, results and pooled results, and operations of one map."""

    a: int
    z: int
    p: int
    unit: int
    first: bool


class Uses(NamedTuple):
    """How often a, z and p are read or written."""

    a: int
    z: int
    p: int


INNER_UNITS, INNER_UNITS_FIRST = 9, 4
QUERY_UNITS, QUERY_UNITS_FIRST = 3, 2
# Sums of the table above. The first layer has no gradient of images; there the next row writes vz'.
INNER_USES, INNER_USES_FIRST = Uses(a=8, z=17, p=5), Uses(a=4, z=13, p=5)
QUERY_USES, QUERY_USES_FIRST = Uses(a=3, z=6, p=2), Uses(a=2, z=5, p=2)


def layers(case: Case) -> list[Layer]:
    """Return the four convolutions, and the head as a fifth layer without pooling."""
    channels, height, width = case.image
    found = []
    for number in range(4):
        positions, pooled = height * width, (height // 2) * (width // 2)
        found.append(
            Layer(
                channels * positions,
                case.filters * positions,
                case.filters * pooled,
                2 * 9 * channels * case.filters * positions,
                first=number == 0,
            )
        )
        channels, height, width = case.filters, height // 2, width // 2
    features = channels * height * width
    return [*found, Layer(features, case.ways, 0, 2 * features * case.ways, first=False)]


def support_images(case: Case) -> int:
    """The number of images in all inner steps."""
    return case.tasks * case.ways * case.shots * case.steps


def query_images(case: Case) -> int:
    """The number of images in all query losses: MAML++, as it is timed, has one after every inner step."""
    losses = case.steps if case.method == "mamlpp" else 1
    return case.tasks * case.ways * case.queries * losses


def operations(case: Case) -> int:
    """Floating-point operations of a meta-iteration; a multiplication and an addition count as two."""
    inner = sum(layer.unit * (INNER_UNITS_FIRST if layer.first else INNER_UNITS) for layer in layers(case))
    query = sum(layer.unit * (QUERY_UNITS_FIRST if layer.first else QUERY_UNITS) for layer in layers(case))
    return support_images(case) * inner + query_images(case) * query


def bytes_moved(case: Case) -> int:
    """Bytes that a meta-iteration reads and writes, by the table above."""
    inner = sum(_values(layer, INNER_USES_FIRST if layer.first else INNER_USES) for layer in layers(case))
    query = sum(_values(layer, QUERY_USES_FIRST if layer.first else QUERY_USES) for layer in layers(case))
    return (support_images(case) * inner + query_images(case) * query) * (2 if case.precision == "bf16" else 4)


def _values(layer: Layer, uses: Uses) -> int:
    return layer.a * uses.a + layer.z * uses.z + layer.p * uses.p


class Ceiling(NamedTuple):
    """The limits of a machine in one precision."""

    bandwidth: float  # bytes read and written per second
    rate: float  # operations per second

    def floor(self, case: Case) -> float:
        """The least seconds of a meta-iteration: those of all operations or of all bytes, whichever is longer."""
        return max(operations(case) / self.rate, bytes_moved(case) / self.bandwidth)


def ceiling_of(case: Case, measured: dict[str, Ceiling]) -> Ceiling | None:
    """Return the ceiling that applies to a case."""
    return measured.get(precision_in_pytorch(case.device, case.precision))


def ceilings(
    device: str,
    precisions: tuple[Precision, ...],
    copied: int | None = None,  # bytes of the copy
    width: int | None = None,  # of the square matrices
    repeats: int = 10,
) -> dict[str, Ceiling]:
    """Measure a device. By default the sizes are large enough to fill it."""
    on_gpu = torch.device(device).type == "cuda"
    copied = copied or (2**30 if on_gpu else 2**27)
    width = width or (8192 if on_gpu else 1024)
    bandwidth = 2 * copied / _copy_seconds(device, copied, repeats)
    return {
        precision: Ceiling(bandwidth, 2 * width**3 / _product_seconds(device, precision, width, repeats))
        for precision in dict.fromkeys(precisions)
    }


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Allow or forbid the TF32 units of a GPU for float32 matrix products and convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def synchronise(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _copy_seconds(device: str, size: int, repeats: int) -> float:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _seconds(lambda: target.copy_(source), device, repeats)


def _product_seconds(device: str, precision: Precision, width: int, repeats: int) -> float:
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(width, width, device=device).to(kind) for _ in range(2))
    with tf32_products(precision == "tf32"):
        return _seconds(lambda: left @ right, device, repeats)


def _seconds(action: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of an action; on a GPU of ten actions, since one can end before the next is launched."""
    at_once = 10 if torch.device(device).type == "cuda" else 1
    times = []
    for _ in range(repeats + 2):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(at_once):
            action()
        synchronise(device)
        times.append((time.perf_counter() - started) / at_once)
    return statistics.median(times[2:])
