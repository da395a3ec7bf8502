"""A run of the benchmark: every case in turn, and nothing lost or hidden when one fails."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gradshare import __version__
from gradshare.bench.cases import Case, Precision
from gradshare.bench.ceilings import ceilings
from gradshare.bench.measure import measure
from gradshare.bench.results import Failure, Measurement, Results
from gradshare.bench.rivals import versions
from gradshare.errors import UserError

Said = Callable[[Measurement | Failure], None]


def begin(device: str, precisions: tuple[Precision, ...], sweep: str | None = None, **sizes: int) -> Results:
    """Results without a case yet: the machine, and its ceilings measured."""
    on_gpu = torch.device(device).type == "cuda"
    needed: tuple[Precision, ...] = (*precisions, "tf32") if on_gpu else precisions
    return Results(machine(device), ceilings(device, needed, **sizes), sweep=sweep)


def run(
    cases: Iterable[Case],
    results: Results,
    path: Path | None = None,
    said: Said = lambda outcome: None,
    **options: Any,
) -> None:
    """Time cases one after the other; write the file after each, so that a killed run keeps what it has.

    Args:
        path: JSON file for the results; None writes none.
        said: is told of every outcome as it comes.
        options: of `measure`.
    """
    for case in cases:
        outcome = _attempt(case, options)
        if isinstance(outcome, Failure):
            results.failures.append(outcome)
        else:
            results.measurements.append(outcome)
        said(outcome)
        if path is not None:
            results.save(path)


def _attempt(case: Case, options: dict[str, Any]) -> Measurement | Failure:
    try:
        return measure(case, **options)
    except UserError as error:
        return Failure(case, str(error))
    except Exception as error:  # out of memory, a kernel that does not compile: the other cases still count
        return Failure(case, " ".join(f"{type(error).__name__}: {error}".split())[:300])
    finally:
        gc.collect()  # a recorded step and its buffers


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "gradshare": __version__,
        "rivals": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
