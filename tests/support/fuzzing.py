"""Bad input, one case at a time: the real command line in this process, what it may print, which files it may change.

Only long work is replaced: epochs, evaluation, timing, worker processes, drawing and the network.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

import gradshare.reports.write  # imports matplotlib, which writes to the user's folder when it is first imported
from gradshare.cli.app import main
from gradshare.data.store import ClassEntry, Index, write_store
from gradshare.errors import DamageWarning, UserError
from gradshare.experiments.grid import NOTES
from tests.support.commands import Here

CASES = int(os.environ.get("FUZZ_CASES", "800"))
"""Cases in all; `make fuzz` sets more than 10,000."""
SECONDS = 60  # a case that takes longer fails
MEMORY = 3 << 30  # bytes that a case may allocate; one that needs more must end with an error
REPORT = {"report.html", "table.md", "table.tex", "table.csv", "experiments.csv", "summary.json"}
REPORT |= {f"{kind}.{form}" for kind in ("curves", "gates") for form in ("png", "svg")}
RESUMED = {"metrics.jsonl", "timings.jsonl"}  # `--resume` rebuilds them from the checkpoint
DATA = ("glyphs", "cub", "cub-resize", "mini")


class Hang(BaseException):
    """A case that takes too long. Not an Exception, so that no handler catches it."""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def call(*words: str) -> Ended:
    """Run `gradshare WORDS`; any exception but SystemExit passes through and fails the test."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"over {SECONDS} s")

    # The error handlers are those of Python's own streams.
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)  # again every second: Python ignores what a callback raises
    try:
        with (
            patch("sys.argv", ["gradshare", *words]),
            patch("sys.stdout", out),
            patch("sys.stderr", err),
            no_damage_warnings(),
        ):
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
def no_damage_warnings() -> Iterator[None]:
    """Ignore warnings about damage that a run can continue without; other warnings are errors, as in all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        yield


def prints(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every path below a folder, with values that change if the file is written or replaced."""
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
    """Runs cases in a folder, and counts how they ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()

    @contextmanager
    def copy(self, name: str, to: str) -> Iterator[Path]:
        """Copy a folder for the length of the block; afterwards remove it and every other new file."""
        before = set(prints(self.folder))
        shutil.copytree(name, to, symlinks=True)
        try:
            yield Path(to)
        finally:
            _remove(set(prints(self.folder)) - before)

    def case(self, family: str, *words: str, may_change: Collection[str] = (), own: Path | None = None) -> Ended:
        """Run a case: exit code 0 and nothing on stderr, or exit code 2, one line there and no file changed.

        Args:
            may_change: names of files that a command with exit code 0 may write again.
            own: a run folder. `train` and `compare` may repair all files in it but config.json, also if they then fail.
        """
        before = prints(self.folder)
        ended = call(*words)
        after = prints(self.folder)
        self.counts[f"{family}: {'done' if ended.code == 0 else 'errors'}"] += 1
        lines = ended.err.split("\n")
        if ended.code == 0:
            assert lines in ([""], [TIMING, ""]), ended
        else:
            assert ended.code == 2 and len(lines) == 2 and lines[1] == "", ended
            assert lines[0].startswith("gradshare: ") and len(lines[0].split()) > 2 and "Traceback" not in ended.out
        repaired = f"{own.absolute()}/" if own and words[0] in ("train", "compare") else "nothing"
        changed = {path for path in before if before[path] != after.get(path) and not path.endswith(".lock")}
        changed = {path for path in changed if not _is_note(path, words, before)}
        fixed = () if "--epochs" in words else ("/config.json",)
        changed = {path for path in changed if not path.startswith(repaired) or path.endswith(fixed)}
        allowed = () if ended.code else may_change
        changed = {path for path in changed if os.path.basename(path) not in allowed}
        assert not changed, (words, ended, sorted(changed))
        new = {path for path in after if path not in before}
        download = "there is no network" in ended.err  # an unfinished download keeps its folder
        left = {path for path in new if not path.startswith(repaired) and not _is_note(path, words, before)}
        assert ended.code == 0 or download or not left, (words, ended, sorted(left))
        _remove(new)
        return ended


def _is_note(path: str, words: Collection[str], before: Collection[str]) -> bool:
    """Whether it is a note on a run, `GRID/.grid/...`, or the folder of a new grid, which keeps why its runs failed."""
    grid, inside, _ = path.partition(f"/{NOTES}")
    if [*words][:2] == ["grid", "run"]:
        return os.path.isdir(f"{grid}/{NOTES}")
    return bool(inside) and grid in before


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
    """Replaces bench.measure.Timing."""

    def __init__(self, case: Any, each: int) -> None:
        self.case = case

    def block(self) -> Any:
        return self

    def result(self, eval_tasks: int) -> Any:
        from gradshare.bench.results import Measurement

        return Measurement(case=self.case, **MEASURED)


TIMING = "timing meta-iterations on this machine, about 10 s ..."


def write_data(home: Path) -> None:
    """Write small data sets with the names that presets use."""
    entries = [ClassEntry(f"{split} {i}", split, 20) for split in ("train", "val", "test") for i in range(5)]
    blank = np.zeros((16, 16, 3), np.uint8)
    for name in DATA:
        index = Index(name, (16, 16, 3), tuple(entries), "none", "made by the tests")
        write_store(home / name, index, (blank for _ in range(index.images)))


@contextmanager
def without_long_work() -> Iterator[None]:
    """Replace long work by its shortest result, and limit the memory."""
    from gradshare.bench import measure, rivals
    from gradshare.data import download
    from gradshare.experiments import estimate, ray, supervise
    from gradshare.runs import display, evaluate, train

    really_evaluate = evaluate.evaluate

    def finish(run: Any) -> train.Trained:
        run.dataset.sample("train", run.shape, run.training.tasks, (run.training.seed,))
        return train.Trained(run.folder.path, run.state, [], {}, run.learner, run.dataset, run.training)

    def evaluate_two(
        learner: Any, states: Any, dataset: Any, split: str, shape: Any, tasks: int, *rest: Any, **how: Any
    ) -> Any:
        return really_evaluate(learner, states, dataset, split, shape, min(tasks, 2), *rest, **how)

    def connect(address: tuple[str, int], timeout: float) -> Any:
        if address[1] > 65535:
            raise OverflowError("port must be 0-65535.")  # as the real one does
        raise ConnectionRefusedError(111, "Connection refused")

    def init(**_: Any) -> None:
        raise ConnectionError("there is no cluster here")

    def offline(*_: Any) -> Any:
        raise UserError("there is no network here")

    replaced: dict[tuple[Any, str], Any] = {
        (train._Run, "finish"): finish,
        (display, "show_result"): lambda run: None,
        (supervise, "Local"): Here,
        (supervise, "TICK"): 0.0,
        (estimate, "estimates"): lambda configs, *_: [0.0 for _ in configs],
        (ray.socket, "create_connection"): connect,
        (ray, "_import_ray"): lambda: SimpleNamespace(init=init),
        (download, "_receive"): offline,
        (evaluate, "evaluate"): evaluate_two,
        (measure, "ceilings"): lambda *_, **__: {},
        (measure, "Timing"): Timed,
        (measure, "gc"): SimpleNamespace(collect=lambda: 0),  # slow with the objects of all cases so far
        (rivals, "versions"): dict,
        (gradshare.reports.write, "image_files"): lambda kind, _: dict.fromkeys((f"{kind}.png", f"{kind}.svg"), b""),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.MonkeyPatch.context() as patched:
        for (place, name), instead in replaced.items():
            patched.setattr(place, name, instead)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Size of this process's address space in bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()
