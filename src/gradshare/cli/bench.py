"""`gradshare bench`: how long a meta-iteration takes here. Heavy modules are imported by the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gradshare.bench.cases import (
    PAPER,
    SHAPES,
    SWEEPS,
    Arm,
    Case,
    Engine,
    Method,
    Precision,
    ShapeName,
    SweepName,
    cases_of,
    swept,
)
from gradshare.cli.waiting import bar, stoppable
from gradshare.errors import UserError, check_range
from gradshare.files import check_output

SEVERAL = Parameter(consume_multiple=True, negative=())
RESULTS = b'{\n "version"'  # how such a file begins


def bench(
    *,
    shape: Annotated[tuple[ShapeName, ...], SEVERAL] = (),
    methods: Annotated[tuple[Method, ...], SEVERAL] = ("maml", "metasgd", "mamlpp"),
    arms: Annotated[tuple[Arm, ...], SEVERAL] = ("original", "shared"),
    engines: Annotated[tuple[Engine, ...], SEVERAL] = (),
    precisions: Annotated[tuple[Precision, ...], SEVERAL] = (),
    rivals: bool | None = None,
    sweep: SweepName | None = None,
    values: Annotated[tuple[int, ...], SEVERAL] = (),
    iterations: int | None = None,
    eval_tasks: int = 0,
    tasks: int | None = None,
    shots: int | None = None,
    queries: int | None = None,
    steps: int | None = None,
    filters: int | None = None,
    size: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int = 0,
    json: Path | None = None,
) -> None:
    """Time whole meta-iterations on random images, beside the libraries higher and TorchOpt where they are installed.

    Drawing the tasks, inner loop, outer gradient and Adam are all in. The table also shows operations, bytes, and how
    near the time is to what the machine could do at best.

    Parameters
    ----------
    shape
        What to time: the paper's four (84x84x3, 5-way, 5 inner steps, 48 filters), the default on a GPU; or cpu
        (5task-1shot at 28x28x1), the default on a CPU.
    methods
        Which algorithms.
    arms
        Without sharing (original), with it (shared), or both.
    engines
        eager: operation by operation, all that a CPU has; graph: one CUDA graph. By default all there are.
    precisions
        float32: PyTorch's operations, all that a CPU has; tf32 and bf16: our GPU kernels, the default on a GPU.
    rivals
        Also time the other libraries (pip install 'gradshare[bench]'); by default only without --sweep.
    sweep
        Vary one size of the (first) shape instead: tasks, steps, shots, or size, the side of an image.
    values
        The sizes to time with --sweep.
    iterations
        Meta-iterations timed for each case; by default 20 on a CPU and 200 on a GPU.
    eval_tasks
        Also time evaluation on so many tasks; the paper has 600.
    tasks
        Tasks in a batch, instead of the shape's.
    shots
        Support images of a class, instead of the shape's.
    queries
        Query images of a class, instead of 15.
    steps
        Inner steps, instead of 5.
    filters
        Filters in each layer, instead of 48.
    size
        Side of an image, instead of the shape's.
    device
        Where to compute; auto is a GPU where there is one.
    threads
        CPU threads; 0 is one for each core.
    json
        A file for all figures, written after each case (on a CPU, where cases take turns, at the end).
    """
    if values and sweep is None:
        raise UserError("--values are for --sweep: say what to vary, such as --sweep tasks")
    if not (methods and arms):
        raise UserError("there is nothing to time: give at least one to --methods and to --arms")
    for option, value in {"iterations": iterations, "eval_tasks": eval_tasks, "threads": threads}.items():
        if value is not None:
            check_range(option, value, 1 if option == "iterations" else 0)
    if json is not None:
        check_output(json, RESULTS, "the results of a benchmark")
    from gradshare.runs.build import settle
    from gradshare.runs.config import RunConfig

    place = settle(RunConfig(device=device, threads=threads)).device
    on_gpu = place == "cuda"
    sizes = {"tasks": tasks, "shots": shots, "queries": queries, "steps": steps, "filters": filters}
    changed = {name: value for name, value in sizes.items() if value is not None}
    shapes = shape or (PAPER if on_gpu else ("cpu",))
    settings = [_setting(name, changed, size, place) for name in shapes]
    if sweep is not None:
        settings = [swept(settings[0], sweep, value) for value in values or SWEEPS[sweep]]
    kinds: tuple[Precision, ...] = precisions or (("bf16", "tf32") if on_gpu else ("float32",))
    chosen = (methods, arms, engines or (("graph", "eager") if on_gpu else ("eager",)), kinds)
    beside = sweep is None if rivals is None else rivals
    cases = [case for setting in settings for case in cases_of(setting, *chosen, beside)]
    _run(cases, place, kinds, sweep, json, iterations=iterations or (200 if on_gpu else 20), eval_tasks=eval_tasks)


def _setting(name: ShapeName, changed: dict[str, int], size: int | None, device: str) -> dict[str, Any]:
    setting = {**SHAPES[name], **changed, "device": device}
    return setting if size is None else swept(setting, "size", size)


ROUNDS = 10  # on a CPU


def _run(
    cases: list[Case],
    device: str,
    precisions: tuple[Precision, ...],
    sweep: SweepName | None,
    path: Path | None,
    **options: int,
) -> None:
    from rich.console import Console

    from gradshare.bench.results import Failure, Measurement
    from gradshare.bench.running import begin, run, run_in_turn
    from gradshare.bench.table import line_of, notes, rich_tables

    on_gpu = device == "cuda"
    if not on_gpu:
        kept = "cases take turns on a CPU, so there are no figures before the end"
    else:
        kept = f"what was timed so far is in {path}" if path else "--json FILE would have kept what was timed"
    with stoppable(kept), bar("timing", "cases" if on_gpu else "rounds of all cases") as progress:
        progress(0, len(cases) if on_gpu else ROUNDS)
        results = begin(device, precisions, sweep)

        def said(outcome: Measurement | Failure) -> None:
            print(line_of(outcome), flush=True)
            if on_gpu:
                progress(len(results.measurements) + len(results.failures), len(cases))

        if on_gpu:
            run(cases, results, path, said, **options)
        else:
            run_in_turn(cases, results, path, said, progress, blocks=ROUNDS, **options)
    if not any(measurement.case.library == "gradshare" for measurement in results.measurements):
        raise UserError(f"nothing of ours could be timed: {results.failures[-1].reason}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in rich_tables(results):
        console.print("", table)
    console.print("", *notes(results), sep="\n", markup=False, highlight=False)
