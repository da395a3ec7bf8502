"""SIGTERM and Ctrl-C in every phase: exit code 3, how to go on, and the same bits in the end."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

from .children import Ended, gradshare
from .moments import Trap, send
from .runs import Run
from .settings import Chaos

STOPPED = 3
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def phase(run: Run, n: int) -> str:
    """What a run is doing at its n-th moment."""
    moment = run.moments[n - 1]
    begun = any(m.kind == "rename" and "config.json" in m.where for m in run.moments[: n - 1])
    if moment.kind == "load":
        return "data loading"
    if moment.where == "tasks":
        return (
            {"train": "iteration", "val": "validation", "test": "test"}[moment.kind] if begun else "checking the data"
        )
    for word in ("lock", "config", "checkpoints", "metrics", "timings", "summary", "DONE"):
        if word in moment.where:
            return word
    return "the folder"


def of_every_phase(chaos: Chaos, run: Run) -> list[int]:
    """A moment of each phase."""
    by_phase: dict[str, list[int]] = {}
    for n in range(1, len(run.moments) + 1):
        by_phase.setdefault(phase(run, n), []).append(n)
    return [chaos.random.choice(some) for some in by_phase.values()]


def stop(chaos: Chaos) -> None:
    """Both signals in every phase, and one at every moment of a run; two signals; signals by the clock."""
    run = chaos.runs[0]
    moments = [(n, number) for n in of_every_phase(chaos, run) for number in SIGNALS]
    if chaos.thorough:
        moments += [(n, SIGNALS[n % 2]) for n in range(1, len(run.moments) + 1)]
    for n, number in moments:
        _stop_at(chaos, run, n, f"{number.name}: {phase(run, n)}", number)
    for n in [n for n, _ in moments][:: 4 if chaos.thorough else 6]:
        _stop_at(chaos, run, n, "Ctrl-C twice", signal.SIGINT, signal.SIGINT)
    for _ in range(40 if chaos.thorough else 4):
        number, run = chaos.random.choice(SIGNALS), chaos.random.choice(chaos.runs)
        seconds = chaos.random.uniform(0.05, run.seconds)
        with chaos.trying(f"{number.name} by the clock", f"{run.name}, after {seconds:.3f} s") as place:
            ended = gradshare(*run.start(place / "run"), after_seconds=seconds, number=number)
            run.finish(place / "run", must_stop_well(ended, place / "run"))


def _stop_at(chaos: Chaos, run: Run, n: int, what: str, *numbers: int) -> None:
    with chaos.trying(what, f"{run.name}, moment {n}: {run.moments[n - 1]}") as place:
        ended = gradshare(*run.start(place / "run"), before=Trap(place, n, send(*numbers)).set)
        to_go_on = must_stop_well(ended, place / "run")
        tested = n > max(n for n, moment in enumerate(run.moments, 1) if moment.where == "tasks")
        ended.must(tested or ended.code == STOPPED, "a signal was not answered")
        run.finish(place / "run", to_go_on)


def must_stop_well(ended: Ended, folder: Path) -> tuple[str, ...]:
    """Exit code 3 and the words to go on with; or () if the signal came when nothing was left to be stopped."""
    ended.must_be_tidy()
    if ended.code == 0:
        ended.must((folder / "DONE").exists(), "exit code 0, and the run is not done")
        return ()
    _, told, command = ended.text.rpartition("to go on: gradshare ")
    ended.must(ended.code == STOPPED and bool(told), "a signal was not answered well")
    return tuple(shlex.split(command))
