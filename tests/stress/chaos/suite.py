"""All kinds of disturbance in turn, and the table of counts."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from random import Random

from . import clocks, cut_files, damage, full_disk, kills, real_processes, signals
from .children import Broken
from .runs import make_data, prepare, warm_up
from .settings import Chaos, Kind, TimeIsUp

PARTS: dict[str, list[Kind]] = {
    "kills": [kills.at_moments, kills.until_done],
    "signals": [signals.of_every_phase, signals.at_every_moment, signals.twice, signals.by_the_clock],
    "full-disk": [full_disk.full_from_a_write_on, full_disk.full_tmpfs],
    "read-only": [full_disk.read_only_from_a_write_on, full_disk.read_only_tmpfs, full_disk.of_another_user],
    "damage": [damage.files, damage.lock_files, damage.checkpoints_of_another_run],
    "cut-files": [cut_files.unfinished, cut_files.finished],
    "clocks": [clocks.jumps, clocks.dated_locks],
    "processes": [real_processes.train, real_processes.compare],
}


def run_suite(parts: list[str], seed: int, wanted_kills: int, wanted_damaged: int, minutes: float, sample: bool) -> int:
    """Run these parts and return the exit code: 0 if every promise was kept.

    Args:
        sample: stop when the minutes are over; else that is a failure.
    """
    started = time.monotonic()
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None  # spares the disk
    folder = Path(tempfile.mkdtemp(prefix="gradshare-chaos-", dir=parent))
    data = make_data(folder / "data")
    warm_up(folder / "warm", data)
    runs = prepare(folder, data, seed)
    chaos = Chaos(folder, runs, wanted_kills, wanted_damaged, started + 60 * minutes)
    again = f"--seed {seed} --kills {wanted_kills} --damaged {wanted_damaged}"
    try:
        _in_turn(chaos, parts, seed)
    except Broken as error:
        return _fail(chaos, f"{error} {again}")
    except TimeIsUp as error:
        if not sample:
            return _fail(chaos, str(error))
    _show(chaos)
    print(f"every promise was kept, {chaos.kept.total():,} times in {(time.monotonic() - started) / 60:.1f} minutes")
    shutil.rmtree(folder)
    return 0


def _in_turn(chaos: Chaos, parts: list[str], seed: int) -> None:
    """Try all kinds. The one that has had the least time is next, so that a sample has some of each."""
    kinds = {(part, kind.__name__): kind for part in parts for kind in PARTS[part]}
    waiting = {key: kind(chaos, Random(f"{seed} {key}")) for key, kind in kinds.items()}
    seconds = dict.fromkeys(waiting, 0.0)
    while waiting:
        key = min(waiting, key=seconds.__getitem__)
        since = time.monotonic()
        try:
            if next(waiting[key], "done") == "done":
                del waiting[key]
        except Broken as error:
            raise Broken(f"{error}\nagain: python -m tests.stress.chaos --only {key[0]}") from None
        seconds[key] += time.monotonic() - since


def _fail(chaos: Chaos, why: str) -> int:
    _show(chaos)
    print(f"BROKEN: {why}")
    return 1


def _show(chaos: Chaos) -> None:
    print(f"{'tried':>7}{'kept':>7}  what")
    for what, tries in chaos.tried.items():
        print(f"{tries:>7,}{chaos.kept[what]:>7,}  {what}")
        for outcome, count in chaos.outcomes.items():
            if outcome.startswith(f"{what}: "):
                print(f"{'':>14}    {count:,} {outcome.removeprefix(f'{what}: ')}")
    for what, reason in chaos.skipped.items():
        print(f"{'-':>7}{'-':>7}  {what}: skipped, {reason}")
