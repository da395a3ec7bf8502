"""`gradshare bench`: how long a meta-iteration takes here. Heavy modules are imported by the command."""

from __future__ import annotations

import sys
from dataclasses import dataclass
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
from gradshare.cli.options import SEVERAL
from gradshare.cli.waiting import bar, stoppable
from gradshare.errors import MOST_THREADS, UserError, check_range, say
from gradshare.files import check_output
from gradshare.runs.config import check_backbone

RESULTS = b'{\n "version"'  # how a file of results begins
ROUNDS = 10  # on a CPU, where cases take turns


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to time, and how."""

    shape: Annotated[tuple[ShapeName, ...], SEVERAL] = ()
    """Setting: the paper's four (84x84x3, 5-way, 5 inner steps, 48 filters), the default on a GPU; or cpu (5task-1shot
    at 28x28x1), the default on a CPU."""
    methods: Annotated[tuple[Method, ...], SEVERAL] = ("maml", "metasgd", "mamlpp")
    """Algorithms; momentum and adam are MAML with that inner optimiser, adaptnorm is MAML that adapts batch norm."""
    arms: Annotated[tuple[Arm, ...], SEVERAL] = ("original", "shared")
    """Without sharing (original), with it (shared), or both."""
    backbone: str = "conv4"
    """Network: conv4, resnet12, vit, or one of your own, package.module:Class, called with (ways, image)."""
    engines: Annotated[tuple[Engine, ...], SEVERAL] = ()
    """eager: operation by operation; graph: one CUDA graph; compiled: on a CPU, programs of the network. By default
    those of the device; compiled only for other networks than conv4."""
    precisions: Annotated[tuple[Precision, ...], SEVERAL] = ()
    """float32: PyTorch's operations, the default on a CPU; bf16, also on a CPU, and tf32, the defaults on a GPU: our
    code for conv4, compiled programs for other networks."""
    rivals: bool | None = None
    """Also time the other libraries (pip install 'gradshare[bench]'); by default only without --sweep."""
    sweep: SweepName | None = None
    """Vary one size of the (first) shape instead: tasks, steps, shots, or size, the side of an image."""
    values: Annotated[tuple[int, ...], SEVERAL] = ()
    """The sizes to time with --sweep."""
    iterations: int | None = None
    """Meta-iterations timed for each case; by default 20 on a CPU and 200 on a GPU."""
    eval_tasks: int = 0
    """Also time the evaluation of this many tasks; the paper has 600."""
    tasks: int | None = None
    """Tasks in a batch, instead of the shape's."""
    shots: int | None = None
    """Support images of a class, instead of the shape's."""
    queries: int | None = None
    """Query images of a class, instead of 15."""
    steps: int | None = None
    """Inner steps, instead of 5."""
    filters: int | None = None
    """Filters in each layer, instead of 48."""
    size: int | None = None
    """Side of an image, instead of the shape's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is a GPU if there is one."""
    threads: int = 0
    """CPU threads; 0: as OMP_NUM_THREADS says, else one for each core."""
    json: Path | None = None
    """File for all results, written after each case (on a CPU, where cases take turns, at the end)."""

    def check(self) -> None:
        if self.values and self.sweep is None:
            raise UserError("--values needs --sweep: say what to vary, such as --sweep tasks")
        if not (self.methods and self.arms):
            raise UserError("there is nothing to time: give at least one value to --methods and to --arms")
        if self.backbone != "conv4" and self.filters is not None:
            raise UserError(f"only conv4 has a choice of filters, not {self.backbone}: leave --filters out")
        check_range("iterations", 1 if self.iterations is None else self.iterations, 1)
        check_range("eval_tasks", self.eval_tasks, 0)
        check_range("threads", self.threads, 0, MOST_THREADS)
        if self.json is not None:
            check_output(self.json, RESULTS, "the results of a benchmark")

    def precisions_on(self, device: str) -> tuple[Precision, ...]:
        return self.precisions or (("bf16", "tf32") if device == "cuda" else ("float32",))

    def cases(self, device: str) -> list[Case]:
        """All that is to be timed on a device."""
        on_cpu: tuple[Engine, ...] = ("eager",) if self.backbone == "conv4" else ("eager", "compiled")
        engines: tuple[Engine, ...] = self.engines or (("graph", "eager") if device == "cuda" else on_cpu)
        rivals = self.sweep is None if self.rivals is None else self.rivals
        chosen = (self.methods, self.arms, engines, self.precisions_on(device), rivals)
        return [case for setting in self._settings(device) for case in cases_of(setting, *chosen)]

    def _settings(self, device: str) -> list[dict[str, Any]]:
        sizes = {name: getattr(self, name) for name in ("tasks", "shots", "queries", "steps", "filters")}
        changed = {name: value for name, value in sizes.items() if value is not None}
        shapes = self.shape or (PAPER if device == "cuda" else ("cpu",))
        changed["backbone"] = check_backbone(self.backbone)
        settings = [{**SHAPES[name], **changed, "device": device} for name in shapes]
        if self.size is not None:
            settings = [swept(setting, "size", self.size) for setting in settings]
        if self.sweep is None:
            return settings
        return [swept(settings[0], self.sweep, value) for value in self.values or SWEEPS[self.sweep]]


def bench(benchmark: Benchmark = Benchmark()) -> None:
    """Time whole meta-iterations on random images, next to the libraries higher and TorchOpt if they are installed.

    A meta-iteration draws the tasks, runs the inner loop, computes the outer gradient and steps Adam. The table also
    shows operations, bytes, and how near the time is to the best that the machine could do.
    """
    benchmark.check()
    from gradshare.engine.choose import apply, choose

    choice = choose(benchmark.device, threads=benchmark.threads)
    apply(choice)
    _run(benchmark, benchmark.cases(choice.device), choice.device)


def _run(benchmark: Benchmark, cases: list[Case], device: str) -> None:
    from rich.console import Console

    from gradshare.bench.measure import begin, run
    from gradshare.bench.results import Failure, Measurement, line_of, notes, rich_tables

    on_gpu, path = device == "cuda", benchmark.json
    iterations = benchmark.iterations or (200 if on_gpu else 20)
    with stoppable(_kept(on_gpu, path)), bar("timing", "cases" if on_gpu else "rounds of all cases") as progress:
        progress(0, len(cases) if on_gpu else ROUNDS)
        results = begin(device, benchmark.precisions_on(device), benchmark.sweep)

        def report(outcome: Measurement | Failure) -> None:
            say(line_of(outcome))
            if on_gpu:
                progress(len(results.measurements) + len(results.failures), len(cases))

        options: dict[str, Any] = {"iterations": iterations, "eval_tasks": benchmark.eval_tasks}
        if on_gpu:
            for case in cases:
                run([case], results, path, report, **options)
        else:
            run(cases, results, path, report, progress, blocks=ROUNDS, **options)
    if not any(measurement.case.library == "gradshare" for measurement in results.measurements):
        raise UserError(f"nothing of ours could be timed: {results.failures[-1].reason}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in rich_tables(results):
        console.print("", table)
    console.print("", *notes(results), sep="\n", markup=False, highlight=False)


def _kept(on_gpu: bool, path: Path | None) -> str:
    """What is left if the benchmark is stopped."""
    if not on_gpu:
        return "cases take turns on a CPU, so there are no results before the end"
    return f"what was timed so far is in {path}" if path else "--json FILE would have kept what was timed"
