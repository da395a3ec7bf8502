"""Clocks that jump by years: the same run, sensible timings, and locks that still work."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from gradshare.runs import locks

from .children import gradshare
from .moments import Trap, die
from .settings import Chaos

YEAR = 365.25 * 24 * 3600


def jumps(chaos: Chaos, random: Random) -> Iterator[None]:
    """Each reading of the wall clock is wrong by another number of years. The run is killed and resumed."""
    for i in range(40):
        run = chaos.runs[i % len(chaos.runs)]
        n, seed = random.randint(1, len(run.moments)), random.random()
        with chaos.trying("clock jumps in a run, then a kill", f"{run.name}, moment {n}, clock {seed}") as place:

            def before(n: int = n, seed: float = seed, place: Path = place) -> None:
                _jumping_clock(Random(seed))
                Trap(place, n, die).set()

            ended = gradshare(*run.start(place / "run"), before=before)
            ended.must(ended.code == -signal.SIGKILL, "the moment did not come")
            again = gradshare(*run.start(place / "run"), before=lambda seed=seed: _jumping_clock(Random(seed + 1)))
            again.must_be_tidy()
            again.must(again.code == 0, "a run was stopped by a clock")
            run.must_equal(place / "run")
            for line in (place / "run" / "timings.jsonl").read_text().splitlines():
                seconds = json.loads(line)
                again.must(0 <= min(seconds["train_seconds"], seconds["val_seconds"]) < 60, f"timings: {line}")
        yield


def _jumping_clock(random: Random) -> None:
    real = time.time
    time.time = lambda: real() + random.choice((-40, -1, 0, 1, 40)) * YEAR


def dated_locks(chaos: Chaos, random: Random) -> Iterator[None]:
    """The lock of a dead process is taken over, that of a living one is not, whatever date the file has."""
    run = chaos.runs[0]
    for years in (-40, -1, 0, 1, 40):
        date = (time.time() + years * YEAR,) * 2
        with chaos.trying("lock of a dead process, dated anyhow", f"{years} years") as place:
            left = locks.lock_of(place / "run")
            left.write_text("process 1 on another machine")
            os.utime(left, date)
            run.finish(place / "run")
        yield
        with chaos.trying("lock of a living process, dated anyhow", f"{years} years") as place:
            with locks.locked(place / "run"):
                os.utime(locks.lock_of(place / "run"), date)
                ended = gradshare(*run.start(place / "run"))
            ended.must_be_tidy()
            ended.must(ended.code == 2 and f"process {os.getpid()}" in ended.text, "the holder is not named")
            run.finish(place / "run")
        yield
