"""Bad input, a case at a time: the real command line in this process, what it may say and what it may leave behind.

Only long work is replaced: epochs, evaluation, timing, workers, drawing and the network. All before that is real.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

import gradshare.reports.figures  # draws with matplotlib, which writes to the user's folder when it is loaded first
from gradshare.cli.app import main
from gradshare.data.store import ClassEntry, Index, write_store
from gradshare.errors import DamageWarning, UserError

CASES = int(os.environ.get("FUZZ_CASES", "800"))
"""Cases in all; `make fuzz` asks for more than 10,000."""
SECONDS = 60
"""What one case may take; a hang is a failure and not a wait."""
MEMORY = 3 << 30
"""Bytes that a case may ask for: one that wants too much is to be told so, and not to be killed."""
REPORT = {"report.html", "table.md", "table.tex", "table.csv", "experiments.csv", "summary.json"}
REPORT |= {f"{kind}.{form}" for kind in ("curves", "gates") for form in ("png", "svg")}
RESUMED = {"metrics.jsonl", "timings.jsonl"}  # what a resume writes anew from its checkpoint
DATA = ("glyphs", "cub", "cub-resize", "mini")


class Hang(BaseException):
    """Not an Exception, so that nothing takes it for bad input."""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def call(*words: str) -> Ended:
    """`gradshare WORDS`: how it ended, and what it said. Whatever it raises goes on, and fails the test."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"over {SECONDS} s")

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", how) for how in ("strict", "backslashreplace"))  # as Python has
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with patch("sys.argv", ["gradshare", *words]), patch("sys.stdout", out), patch("sys.stderr", err), unwarned():
            main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Ended(code, *texts)


@contextmanager
def unwarned() -> Iterator[None]:
    """Without a word on damage that a run goes on without; other warnings are errors here, as in all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        yield


def prints(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a folder, and what would change if it were touched."""
    found: dict[str, tuple[int, ...]] = {}
    waiting = [str(folder)]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            state = entry.stat(follow_symlinks=False)
            directory = entry.is_dir(follow_symlinks=False)
            found[entry.path] = (state.st_mode,) if directory else (state.st_mode, state.st_ino, state.st_mtime_ns)
            if directory and os.access(entry.path, os.R_OK | os.X_OK):
                waiting.append(entry.path)
    return found


class Play:
    """Runs cases in a folder, and keeps the count of how they ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()

    @contextmanager
    def copy(self, name: str, to: str) -> Iterator[Path]:
        """A copy of something in the folder, for as long as the block lasts; nothing else of the case stays."""
        before = set(prints(self.folder))
        shutil.copytree(name, to, symlinks=True)
        try:
            yield Path(to)
        finally:
            _remove(set(prints(self.folder)) - before)

    def case(self, family: str, *words: str, may_change: Collection[str] = (), own: Path | None = None) -> Ended:
        """Run a case: 0 and no complaint, or 2 and one sentence; no file changes but those, and those only by a 0.

        Args:
            may_change: names of files that a command that is done may have written anew.
            own: a run folder: a run that is taken up mends all in it but its configuration, also where it then stops.
        """
        before = prints(self.folder)
        ended = call(*words)
        after = prints(self.folder)
        self.counts[f"{family}: {'done' if ended.code == 0 else 'refused'}"] += 1
        lines = ended.err.split("\n")
        if ended.code == 0:
            assert lines in ([""], [TIMING, ""]), ended
        else:
            assert ended.code == 2 and len(lines) == 2 and lines[1] == "", ended
            assert lines[0].startswith("gradshare: ") and len(lines[0].split()) > 2 and "Traceback" not in ended.out
        mended = f"{own.absolute()}/" if own and words[0] in ("train", "compare") else "nothing"
        changed = {path for path in before if before[path] != after.get(path) and not path.endswith(".lock")}
        settled = () if "--epochs" in words else ("/config.json",)  # more epochs are noted there
        changed = {path for path in changed if not path.startswith(mended) or path.endswith(settled)}
        allowed = () if ended.code else may_change
        changed = {path for path in changed if os.path.basename(path) not in allowed}
        assert not changed, (words, ended, sorted(changed))
        new = {path for path in after if path not in before}
        kept = "there is no network" in ended.err  # what came so far is kept, and here nothing came
        assert ended.code == 0 or kept or all(path.startswith(mended) for path in new), (words, ended, sorted(new))
        _remove(new)
        return ended


def _remove(paths: set[str]) -> None:
    for path in sorted(paths, key=len):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


MEASURED: dict[str, Any] = {
    **{"milliseconds": 1.0, "quartiles": (1.0, 1.0), "iterations": 1, "operations": 1, "bytes_moved": 1},
    "first_step_seconds": 1.0,
}


class Timed:
    """In the place of bench.measure.Timing."""

    def __init__(self, case: Any, each: int) -> None:
        self.case = case

    def block(self) -> None: ...

    def result(self, eval_tasks: int) -> Any:
        from gradshare.bench.results import Measurement

        return Measurement(case=self.case, **MEASURED)


TIMING = "timing meta-iterations on this machine, about 10 s ..."


def write_data(home: Path) -> None:
    """The data sets of the presets, small."""
    entries = [ClassEntry(f"{split} {i}", split, 20) for split in ("train", "val", "test") for i in range(5)]
    blank = np.zeros((16, 16, 3), np.uint8)
    for name in DATA:
        index = Index(name, (16, 16, 3), entries, "none", "made by the tests")
        write_store(home / name, index, (blank for _ in range(index.images)))


@contextmanager
def without_long_work() -> Iterator[None]:
    """Long work replaced by its shortest result."""
    from gradshare.bench import running
    from gradshare.bench.results import Measurement
    from gradshare.data import download
    from gradshare.experiments import comparison, driver, estimate, on_ray
    from gradshare.runs import evaluation, training

    evaluate = evaluation.evaluate

    def finish(run: Any) -> training.Trained:
        run.dataset.sample("train", run.shape, run.training.tasks, (run.training.seed,))
        return training.Trained(run.folder, run.state, [], {"best_epoch": 1, "test": None})

    def side_by_side(configs: Any, folder: Path, jobs: int, screen: Any) -> None:
        for one in configs:
            comparison._train(one, folder / one.arm, comparison.RunDisplay(screen, one.arm))

    def judge(learner: Any, states: Any, dataset: Any, split: str, shape: Any, tasks: int, *rest: Any) -> Any:
        return evaluate(learner, states, dataset, split, shape, min(tasks, 2), *rest)

    def connect(address: tuple[str, int], timeout: float) -> Any:
        if address[1] > 65535:
            raise OverflowError("port must be 0-65535.")  # as the real one does
        raise ConnectionRefusedError(111, "Connection refused")

    def offline(*_: Any) -> Any:
        raise UserError("there is no network here")

    replaced: dict[tuple[Any, str], Callable[..., Any]] = {
        (training._Run, "finish"): finish,
        (comparison, "_parallel"): side_by_side,
        (driver, "drive"): lambda *_: [],
        (estimate, "estimates"): lambda configs: [0.0 for _ in configs],
        (on_ray.socket, "create_connection"): connect,
        (on_ray, "_ray"): offline,
        (download, "_receive"): offline,
        (evaluation, "evaluate"): judge,
        (running, "ceilings"): lambda *_, **__: {},
        (running, "versions"): dict,
        (gradshare.reports.figures, "image"): lambda *_: b'<svg viewBox="0 0 1 1"></svg>',
        (running, "measure"): lambda case, **_: Measurement(case=case, **MEASURED),
        (running, "Timing"): Timed,
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, hard))
    with pytest.MonkeyPatch.context() as patched:
        for (place, name), instead in replaced.items():
            patched.setattr(place, name, instead)
        yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Bytes of this process's address space."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()
