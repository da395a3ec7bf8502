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
        for alive in (False, True):
            who = "living" if alive else "dead"
            with chaos.trying(f"lock of a {who} process, dated anyhow", f"{years} years") as place:
                lock = locks.lock_of(place / "run")
                own = locks._own()._asdict()
                lock.write_text(json.dumps(own if alive else {**own, "born": own["born"] + 1}))
                os.utime(lock, (time.time() + years * YEAR,) * 2)
                ended = gradshare(*run.start(place / "run"))
                ended.must_be_tidy()
                ended.must(ended.code == (2 if alive else 0), "a lock was not understood")
                ended.must(not alive or "is in use by process" in ended.text, "the holder is not named")
                lock.unlink(missing_ok=True)
                run.finish(place / "run")
            yield
