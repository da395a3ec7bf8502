"""A full disk at every write, and a read-only one: a sentence that names the file, nothing lost."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path

from .children import Ended, gradshare
from .moments import WRITING, Trap, fail, send
from .mounts import Mounts, NotAllowed, as_nobody
from .settings import Chaos


def fill(chaos: Chaos) -> None:
    """Every operation that needs room fails from the n-th on; then there is room again."""
    _from_every_write_on(chaos, errno.ENOSPC, "full disk from a write on")
    _real_disk(chaos, "real full disk (a small tmpfs)", _fill_tmpfs)


def forbid(chaos: Chaos) -> None:
    """A run folder that cannot be written to, from the start or later."""
    _from_every_write_on(chaos, errno.EROFS, "read-only from a write on")
    _real_disk(chaos, "real read-only disk (a tmpfs)", _read_only_tmpfs)
    _no_permission(chaos)


def _from_every_write_on(chaos: Chaos, error: int, what: str) -> None:
    run = chaos.runs[0]
    writes = list(enumerate((moment for moment in run.moments if moment.kind in WRITING), 1))
    for n, moment in writes if chaos.thorough or error == errno.ENOSPC else writes[::9]:
        with chaos.trying(what, f"{run.name}, write {n}: {moment}") as place:
            trap = Trap(place, n, fail(error, place), onwards=True, kinds=WRITING)
            must_explain(gradshare(*run.start(place / "run"), before=trap.set), place)
            run.finish(place / "run")


def must_explain(ended: Ended, place: Path) -> None:
    """Exit code 2 and one sentence that names a file of the run."""
    ended.must_be_tidy()
    complaints = [line for line in ended.text.splitlines() if line.startswith("gradshare: ")]
    ended.must(ended.code == 2 and len(complaints) == 1, "not one sentence and exit code 2")
    ended.must(str(place) in complaints[0], "the sentence does not name the file")


def _real_disk(chaos: Chaos, what: str, part: Callable[[Chaos, str, Mounts], None]) -> None:
    try:
        with Mounts(chaos.folder / "disk") as mounts:
            part(chaos, what, mounts)
    except NotAllowed as reason:
        chaos.skipped[what] = str(reason)


def _fill_tmpfs(chaos: Chaos, what: str, mounts: Mounts) -> None:
    run = chaos.runs[0]
    needed = sum(-(-path.stat().st_size // 4096) + 1 for path in run.whole.rglob("*"))  # pages
    for pages in range(1, needed, 2 if chaos.thorough else 12):
        with chaos.trying(what, f"{run.name}, {pages} pages of 4 KiB"):
            mounts.mount(f"size={pages * 4096}")
            ended = gradshare(*run.start(mounts.place / "run"))
            if ended.code:
                must_explain(ended, mounts.place)
            mounts.remount("size=64m")
            run.finish(mounts.place / "run")
            mounts.unmount()


def _read_only_tmpfs(chaos: Chaos, what: str, mounts: Mounts) -> None:
    run = chaos.runs[0]
    folder = mounts.place / "run"
    for n in [0, *range(1, len(run.moments), 9 if chaos.thorough else 60)]:
        with chaos.trying(what, f"{run.name}, after a stop at moment {n}"):
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


def _no_permission(chaos: Chaos) -> None:
    run, what = chaos.runs[0], "run folder of another user"
    for moments in (0, len(run.moments) // 2):
        with chaos.trying(what, f"{run.name}, after {moments} moments") as place:
            if moments:
                gradshare(*run.start(place / "run"), before=Trap(place, moments, send(signal.SIGTERM)).set)
            with as_nobody(place, chaos.folder, chaos.folder / "data") as become:
                must_explain(gradshare(*run.start(place / "run"), before=become), place)
            run.finish(place / "run")
