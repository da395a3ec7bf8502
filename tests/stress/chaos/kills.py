"""SIGKILL at any moment: the run goes on and ends with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .children import Ended, gradshare
from .moments import Trap, die
from .runs import Run
from .settings import Chaos

AT, RUNS = "SIGKILL at a given moment", "runs killed again and again until done"
AGAIN = "SIGKILL by the clock or at a moment, in these runs"


def _moments(chaos: Chaos, random: Random) -> list[tuple[Run, int]]:
    """Half of the kills that are wanted, each at a file operation or a draw of tasks of an undisturbed run."""
    moments = [(run, n) for run in chaos.runs for n in range(1, len(run.moments) + 1)]
    return random.sample(moments, min(len(moments), chaos.kills // 2))


def at_moments(chaos: Chaos, random: Random) -> Iterator[None]:
    for run, n in _moments(chaos, random):
        with chaos.trying(AT, f"{run.name}, moment {n}: {run.moments[n - 1]}") as place:
            ended = gradshare(*run.start(place / "run"), before=Trap(place, n, die).set)
            ended.must(ended.code == -signal.SIGKILL, "the moment did not come")
            run.finish(place / "run")
        yield


def until_done(chaos: Chaos, random: Random) -> Iterator[None]:
    left = chaos.kills - len(_moments(chaos, Random(0)))
    while left > 0:
        run, seed = random.choice(chaos.runs), random.random()
        with chaos.trying(RUNS, f"{run.name}, chance {seed}") as place:
            kills = _kill_until_done(run, place, Random(seed))
            run.finish(place / "run")
        chaos.tried[AGAIN] += kills
        chaos.kept[AGAIN] += kills
        left -= kills
        yield


def _kill_until_done(run: Run, place: Path, random: Random) -> int:
    """Returns the number of kills."""
    kills = 0
    while not (place / "run" / "DONE").exists() or random.random() < 0.3:
        kills += _kill_once(run, place, random, 0.4 + 0.1 * kills).code == -signal.SIGKILL
    return kills


def _kill_once(run: Run, place: Path, random: Random, patience: float) -> Ended:
    """Half of the kills by the clock, half at a moment, which is mostly a file operation.

    Args:
        patience: how long the run may last until then, as a share of a whole one. It grows, so that the run ends.
    """
    if random.random() < 0.5:
        ended = gradshare(*run.start(place / "run"), after_seconds=random.uniform(0, run.seconds * patience))
    else:
        n = random.randint(1, int(len(run.moments) * patience) + 1)
        ended = gradshare(*run.start(place / "run"), before=Trap(place, n, die).set)
    ended.must_be_tidy()
    ended.must(ended.code in (0, -signal.SIGKILL), "a run that was killed could not go on")
    return ended
