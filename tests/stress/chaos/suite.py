"""All parts, one after the other, and the table of counts."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from random import Random

from . import clocks, cut_files, damage, full_disk, kills, real_processes, signals
from .children import Broken
from .runs import make_data, prepare, warm_up
from .settings import Chaos, TimeIsUp

PARTS = {
    "kills": kills.kill,
    "signals": signals.stop,
    "full-disk": full_disk.fill,
    "read-only": full_disk.forbid,
    "damage": damage.damage,
    "cut-files": cut_files.cut,
    "clocks": clocks.jump,
    "processes": real_processes.disturb,
}


def run_suite(parts: list[str], seed: int, wanted_kills: int, wanted_damaged: int, minutes: float, short: bool) -> int:
    """The exit code: 0 if every promise was kept and everything asked for was tried."""
    started = time.monotonic()
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no disk is harmed
    folder = Path(tempfile.mkdtemp(prefix="gradshare-chaos-", dir=parent))
    data = make_data(folder / "data")
    warm_up(folder / "warm", data)
    runs = prepare(folder, data, seed, short)
    chaos = Chaos(folder, runs, wanted_kills, wanted_damaged, not short, started + 60 * minutes)
    try:
        for part in parts:
            chaos.random, since = Random(f"{seed} {part}"), time.monotonic()
            PARTS[part](chaos)
            print(f"{part}: {time.monotonic() - since:.0f} s", flush=True)
    except (Broken, TimeIsUp) as error:
        _show(chaos)
        again = f"python -m tests.stress.chaos --only {part} --seed {seed}{' --short' * short}"
        print(f"BROKEN: {error}\nagain: {again} --kills {wanted_kills} --damaged {wanted_damaged}")
        return 1
    _show(chaos)
    print(f"every promise was kept, {chaos.kept.total():,} times in {(time.monotonic() - started) / 60:.1f} minutes")
    shutil.rmtree(folder)
    return 0


def _show(chaos: Chaos) -> None:
    """The table of counts."""
    print(f"{'tried':>7}{'kept':>7}  what")
    for what, tries in chaos.tried.items():
        print(f"{tries:>7,}{chaos.kept[what]:>7,}  {what}")
        for outcome, count in chaos.outcomes.items():
            if outcome.startswith(f"{what}: "):
                print(f"{'':>14}    {count:,} {outcome.removeprefix(f'{what}: ')}")
    for what, reason in chaos.skipped.items():
        print(f"{'-':>7}{'-':>7}  {what}: skipped, {reason}")
