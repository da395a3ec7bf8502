"""What the machine can do at best, measured: a large copy and a large matrix product, on random data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gradshare.bench.cases import Precision
from gradshare.bench.costs import Ceiling


def ceilings(
    device: str,
    precisions: tuple[Precision, ...],
    copied: int | None = None,  # bytes
    width: int | None = None,  # of the matrices
    repeats: int = 10,
) -> dict[str, Ceiling]:
    """Measure a device; on a GPU sizes are large enough to fill it."""
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
    """Whether matrix products and convolutions of float32 may run on the TF32 units of a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def synchronise(device: str) -> None:
    """Wait until a GPU has done what it was asked to."""
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
    """Median time of an action; several at a time on a GPU, where a single one may be over before the next is asked."""
    together = 10 if torch.device(device).type == "cuda" else 1
    times = []
    for _ in range(repeats + 2):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(together):
            action()
        synchronise(device)
        times.append((time.perf_counter() - started) / together)
    return statistics.median(times[2:])
