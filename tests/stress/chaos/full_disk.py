"""A full disk at every write, and a read-only one: an error that names the file, nothing lost."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .children import Ended, gradshare
from .moments import WRITING, Trap, fail, send
from .mounts import Mounts, NotAllowed, as_nobody
from .runs import Run
from .settings import Chaos

FULL, READ_ONLY = "real full disk (a small tmpfs)", "real read-only disk (a tmpfs)"


def full_from_a_write_on(chaos: Chaos, random: Random) -> Iterator[None]:
    """Every operation that needs room fails from the n-th on; then there is room again."""
    return _from_every_write_on(chaos, random, errno.ENOSPC, "full disk from a write on")


def read_only_from_a_write_on(chaos: Chaos, random: Random) -> Iterator[None]:
    return _from_every_write_on(chaos, random, errno.EROFS, "read-only from a write on")


def _from_every_write_on(chaos: Chaos, random: Random, error: int, what: str) -> Iterator[None]:
    run = chaos.runs[0]
    writes = list(enumerate((moment for moment in run.moments if moment.kind in WRITING), 1))
    for n, moment in random.sample(writes, len(writes)):
        with chaos.trying(what, f"{run.name}, write {n}: {moment}") as place:
            trap = Trap(place, n, fail(error, place), onwards=True, kinds=WRITING)
            must_explain(gradshare(*run.start(place / "run"), before=trap.set), place)
            run.finish(place / "run")
        yield


def must_explain(ended: Ended, place: Path) -> None:
    """Exit code 2 and one line that names a file of the run."""
    ended.must_be_tidy()
    complaints = [line for line in ended.text.splitlines() if line.startswith("gradshare: ")]
    ended.must(ended.code == 2 and len(complaints) == 1, "not one line and exit code 2")
    ended.must(str(place) in complaints[0], "the line does not name the file")


def full_tmpfs(chaos: Chaos, random: Random) -> Iterator[None]:
    """A real disk of every size up to what a run needs; then a larger one."""
    run = chaos.runs[0]
    needed = sum(-(-path.stat().st_size // 4096) + 1 for path in run.whole.rglob("*"))  # pages
    try:
        with Mounts(chaos.folder / "full") as mounts:
            for pages in random.sample(range(1, needed, 2), len(range(1, needed, 2))):
                with chaos.trying(FULL, f"{run.name}, {pages} pages of 4 KiB"):
                    mounts.mount(f"size={pages * 4096}")
                    ended = gradshare(*run.start(mounts.place / "run"))
                    if ended.code:
                        must_explain(ended, mounts.place)
                    mounts.remount("size=64m")
                    run.finish(mounts.place / "run")
                    mounts.unmount()
                yield
    except NotAllowed as reason:
        chaos.skipped[FULL] = str(reason)


def read_only_tmpfs(chaos: Chaos, random: Random) -> Iterator[None]:
    """A real disk that becomes read-only after a stop; a finished run on it can still be tested."""
    run = chaos.runs[0]
    stops = [0, *range(1, len(run.moments), 9)]
    try:
        with Mounts(chaos.folder / "read-only") as mounts:
            for n in random.sample(stops, len(stops)):
                with chaos.trying(READ_ONLY, f"{run.name}, after a stop at moment {n}"):
                    _run_on_a_read_only_disk(run, mounts, n)
                yield
    except NotAllowed as reason:
        chaos.skipped[READ_ONLY] = str(reason)


def _run_on_a_read_only_disk(run: Run, mounts: Mounts, n: int) -> None:
    folder = mounts.place / "run"
    mounts.mount("size=64m")
    if n:
        gradshare(*run.start(folder), before=Trap(mounts.place, n, send(signal.SIGTERM)).set)
    mounts.remount("ro")
    ended = gradshare(*run.start(folder))
    if not (folder / "DONE").exists():
        must_explain(ended, mounts.place)
    mounts.remount("rw")
    run.finish(folder)
    mounts.remount("ro")
    ended = gradshare("test", folder, "--tasks", 4)
    ended.must_be_tidy()
    ended.must(ended.code == 0, "a finished run on a read-only disk cannot be used")
    mounts.unmount()


def of_another_user(chaos: Chaos, random: Random) -> Iterator[None]:
    run = chaos.runs[0]
    for moments in (0, len(run.moments) // 2):
        with chaos.trying("run folder of another user", f"{run.name}, after {moments} moments") as place:
            if moments:
                gradshare(*run.start(place / "run"), before=Trap(place, moments, send(signal.SIGTERM)).set)
            with as_nobody(place, chaos.folder, chaos.folder / "data") as become:
                must_explain(gradshare(*run.start(place / "run"), before=become), place)
            run.finish(place / "run")
        yield
