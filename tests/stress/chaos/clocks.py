"""Clocks that jump by years: the same run, sensible timings, and locks that neither open nor stay for ever."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from random import Random

from gradshare.runs import locks

from .children import gradshare
from .moments import Trap, die
from .settings import Chaos

YEAR = 365.25 * 24 * 3600


def jump(chaos: Chaos) -> None:
    """Every reading of the wall clock is off by years, another time each; killed, resumed, the same run."""
    for i in range(40 if chaos.thorough else 4):
        run = chaos.runs[i % len(chaos.runs)]
        n, seed = chaos.random.randint(1, len(run.moments)), chaos.random.random()
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
    _locks(chaos)


def _jumping_clock(random: Random) -> None:
    real = time.time
    time.time = lambda: real() + random.choice((-40, -1, 0, 1, 40)) * YEAR


def _locks(chaos: Chaos) -> None:
    """A dead process's lock is taken over and a living one's is not, whatever date the file has."""
    run = chaos.runs[0]
    for years in (-40, 0, 40):
        with chaos.trying("lock of a dead process, dated anyhow", f"{years} years") as place:
            lock = locks.lock_of(place / "run")
            lock.write_text("process 1 on nowhere\n")
            os.utime(lock, (time.time() + years * YEAR,) * 2)
            run.finish(place / "run")
        with chaos.trying("lock of a living process, dated anyhow", f"{years} years") as place:
            with locks.locked(place / "run"):
                os.utime(locks.lock_of(place / "run"), (time.time() + years * YEAR,) * 2)
                ended = gradshare(*run.start(place / "run"))
                ended.must_be_tidy()
                ended.must(ended.code == 2, "a lock was not understood")
                ended.must(f"is in use by process {os.getpid()}" in ended.text, "the holder is not named")
            run.finish(place / "run")
