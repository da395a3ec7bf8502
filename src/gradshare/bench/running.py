"""A run of the benchmark: every case in turn, and nothing lost or hidden when one fails."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradshare import __version__
from gradshare.bench.cases import Case, Precision
from gradshare.bench.ceilings import ceilings
from gradshare.bench.measure import Timing, measure
from gradshare.bench.results import Failure, Measurement, Results
from gradshare.bench.rivals import versions
from gradshare.errors import UserError

T = TypeVar("T")
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
        _keep(_attempt(case, partial(measure, case, **options)), results, path, said)


def run_in_turn(
    cases: list[Case],
    results: Results,
    path: Path | None = None,
    said: Said = lambda outcome: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    iterations: int = 20,
    blocks: int = 10,
    eval_tasks: int = 0,
) -> None:
    """The same with a block of each case in turn: a shared machine is now fast and now slow, and so for all of them.

    All cases are in memory at a time, so this is for a CPU.

    Args:
        progress: is told how many rounds are done, of how many.
    """
    made = [_attempt(case, partial(Timing, case, max(1, iterations // blocks))) for case in cases]
    for done in range(blocks):
        progress(done, blocks)
        made = [one if isinstance(one, Failure) else _attempt(one.case, partial(_with_a_block, one)) for one in made]
    for one in made:
        done_with = one if isinstance(one, Failure) else _attempt(one.case, partial(one.result, eval_tasks))
        _keep(done_with, results, path, said)


def _with_a_block(timing: Timing) -> Timing:
    timing.block()
    return timing


def _keep(outcome: Measurement | Failure, results: Results, path: Path | None, said: Said) -> None:
    if isinstance(outcome, Failure):
        results.failures.append(outcome)
    else:
        results.measurements.append(outcome)
    said(outcome)
    if path is not None:
        results.save(path)


def _attempt(case: Case, work: Callable[[], T]) -> T | Failure:
    try:
        return work()
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
