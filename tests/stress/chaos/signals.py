"""SIGTERM and Ctrl-C in every phase: exit code 3, how to go on, and the same bits in the end."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

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


def of_every_phase(chaos: Chaos, random: Random) -> Iterator[None]:
    """Both signals at a moment of each phase."""
    run = chaos.runs[0]
    by_phase: dict[str, list[int]] = {}
    for n in range(1, len(run.moments) + 1):
        by_phase.setdefault(phase(run, n), []).append(n)
    for moments in by_phase.values():
        for number in SIGNALS:
            _stop_at(chaos, run, random.choice(moments), number)
            yield


def at_every_moment(chaos: Chaos, random: Random) -> Iterator[None]:
    run = chaos.runs[0]
    for n in random.sample(range(1, len(run.moments) + 1), len(run.moments)):
        _stop_at(chaos, run, n, SIGNALS[n % 2])
        yield


def twice(chaos: Chaos, random: Random) -> Iterator[None]:
    """Two Ctrl-C, one directly after the other, at a quarter of the moments."""
    run = chaos.runs[0]
    for n in random.sample(range(1, len(run.moments) + 1), len(run.moments) // 4):
        _stop_at(chaos, run, n, signal.SIGINT, signal.SIGINT)
        yield


def by_the_clock(chaos: Chaos, random: Random) -> Iterator[None]:
    for _ in range(40):
        number, run = random.choice(SIGNALS), random.choice(chaos.runs)
        seconds = random.uniform(0.05, run.seconds)
        with chaos.trying(f"{number.name} by the clock", f"{run.name}, after {seconds:.3f} s") as place:
            ended = gradshare(*run.start(place / "run"), after_seconds=seconds, number=number)
            run.finish(place / "run", must_stop_well(ended, place / "run"))
        yield


def _stop_at(chaos: Chaos, run: Run, n: int, *numbers: signal.Signals) -> None:
    what = "Ctrl-C twice" if len(numbers) > 1 else f"{numbers[0].name}: {phase(run, n)}"
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
