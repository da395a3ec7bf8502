"""Measure everything in docs/performance.md that needs a GPU, most important first. Needs no installed gradshare.

    PYTHONPATH=src python benchmarks/h200.py FOLDER --seconds 60

Results are written to FOLDER after every case, so that an interrupted run loses nothing. A part that uses up its time
leaves out the rest of its cases, and its file says so.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from gradshare.bench.cases import PAPER, SHAPES, SWEEPS, Arm, Case, Engine, Method, Precision, cases_of, swept
from gradshare.bench.results import Failure, Measurement, Results, line_of

METHODS: tuple[Method, ...] = ("maml", "metasgd", "mamlpp")
ARMS: tuple[Arm, ...] = ("original", "shared")
PRECISIONS: tuple[Precision, ...] = ("bf16", "tf32", "float32")


class Part(NamedTuple):
    """Cases that belong together."""

    name: str
    file: str
    cases: list[Case]
    sweep: str | None = None
    eval_tasks: int = 0


def parts(device: str) -> list[Part]:
    """Return all parts, the most important first."""
    settings = [{**SHAPES[name], "device": device} for name in PAPER]

    def ours(engine: Engine, precision: Precision, methods: tuple[Method, ...], arms: tuple[Arm, ...]) -> list[Case]:
        chosen = (methods, arms, (engine,), (precision,))
        return [case for setting in settings for case in cases_of(setting, *chosen, rivals=False)]

    def theirs(precision: Precision) -> list[Case]:
        return [case for setting in settings for case in cases_of(setting, (), (), (), (precision,), rivals=True)]

    best = ours("graph", "bf16", ("maml",), ("shared",))
    every_method = ours("graph", "bf16", METHODS, ARMS)
    eager = [case for precision in PRECISIONS for case in ours("eager", precision, ("maml",), ("shared",))]
    return [
        Part("the four shapes", "h200.json", best),
        Part("other methods", "h200.json", [case for case in every_method if case not in best]),
        Part("other libraries", "h200.json", theirs("tf32")),
        Part("TF32", "h200.json", ours("graph", "tf32", METHODS, ("shared",))),
        Part("any module, PyTorch's operations", "h200.json", ours("graph", "float32", ("maml",), ARMS)),
        Part("evaluation", "h200-evaluation.json", best, eval_tasks=600),
        *(
            Part(f"cost against {sweep}", f"h200-sweep-{sweep}.json", _sweep(sweep, device), sweep)
            for sweep in SWEEPS
        ),
        Part("operation by operation", "h200.json", eager),
        Part("other libraries, autocast to bf16", "h200.json", theirs("bf16")),
    ]  # fmt: skip


def _sweep(sweep: str, device: str) -> list[Case]:
    setting = {**SHAPES["5task-5shot"], "device": device}
    return [
        Case(engine="graph", precision=precision, **swept(setting, sweep, value))  # type: ignore[arg-type]
        for precision in ("bf16", "tf32")
        for value in SWEEPS[sweep]  # type: ignore[index]
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seconds", type=float, default=60, help="time for each part")
    arguments.add_argument("--case-seconds", type=float, default=5, help="time for one case")
    arguments.add_argument("--iterations", type=int, default=200, help="meta-iterations timed for each case")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--only", action="append", default=[], help="a part by its name; several times for several")
    given = arguments.parse_args()
    chosen = [part for part in parts(given.device) if not given.only or part.name in given.only]
    if not chosen:
        arguments.error(f"the parts are: {'; '.join(part.name for part in parts(given.device))}")

    from gradshare.bench.measure import begin, run

    def report(outcome: Measurement | Failure) -> None:
        print(line_of(outcome), flush=True)

    started = begin(given.device, PRECISIONS)
    files: dict[str, Results] = {}
    for part in chosen:
        print(f"== {part.name}", flush=True)
        results = files.setdefault(part.file, Results(started.machine, started.ceilings, sweep=part.sweep))
        end = time.monotonic() + given.seconds
        options = {"iterations": given.iterations, "seconds": given.case_seconds, "eval_tasks": part.eval_tasks}
        for case in part.cases:
            if time.monotonic() < end:
                run([case], results, given.folder / part.file, report, **options)
            else:
                results.failures.append(Failure(case, f"left out: its part had used its {given.seconds:g} s"))
                report(results.failures[-1])
        results.save(given.folder / part.file)


if __name__ == "__main__":
    main()
