"""Run folders: the one place that knows which files a run consists of, what is in them and how far the run is.

    config.json      every option, with a checksum
    metrics.jsonl    a line for each epoch; a run that is repeated writes the same bytes
    timings.jsonl    the seconds of each epoch
    checkpoints/     the state after the last epochs and after the best ones
    diverged.json    why the run was stopped, if its numbers were no longer finite
    summary.json     the best epoch and the test
    DONE             SHA-256 of config.json, metrics.jsonl and summary.json, as `sha256sum --check` reads them

Reports and grids read runs without PyTorch, so this module imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from gradshare.errors import UserError
from gradshare.files import parse_json, read_bytes, read_text, record, sha256
from gradshare.runs import locks
from gradshare.runs.config import RunConfig, read_config, run_config
from gradshare.runs.divergence import Divergence

Status = Literal["waiting", "running", "stopped", "failed", "diverged", "done"]
"""How far a run is. The files of a run never say "failed": whoever starts runs in other processes notes that."""
ENSEMBLE = 5  # best epochs whose checkpoints are kept, and which together are the ensemble of the test
CONFIG, METRICS, TIMINGS, SUMMARY, DONE = "config.json", "metrics.jsonl", "timings.jsonl", "summary.json", "DONE"
NOTE = "diverged.json"


@dataclass(frozen=True)
class Epoch:
    """A line of metrics.jsonl. Accuracies are None for regression; losses are None if no task has a finite one."""

    epoch: int  # from 1
    train_loss: float | None = None
    train_accuracy: float | None = None
    skipped: int = 0  # meta-steps not taken, because something was not finite
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_interval: float | None = None  # half the 95 % interval over tasks: of the accuracy, or else of the loss
    val_diverged: int = 0  # validation tasks without a finite loss
    m: tuple[float, ...] | None = None  # the gates of every inner step, after the sigmoid; None: the arm has none
    lam: tuple[float, ...] | None = None
    agreement: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Timing:
    """A line of timings.jsonl."""

    epoch: int
    train_seconds: float
    val_seconds: float


Line = TypeVar("Line", Epoch, Timing)


@dataclass(frozen=True)
class Score:
    """The mean over the test tasks."""

    accuracy: float | None  # None for regression
    interval: float | None  # half the 95 % interval over tasks: of the accuracy, or else of the loss
    loss: float | None
    diverged: int = 0  # tasks without a finite loss
    epochs: tuple[int, ...] = ()  # one, or those of the ensemble


@dataclass(frozen=True)
class Test:
    """The best epoch alone, and the ensemble of the best epochs, on the test tasks."""

    tasks: int
    best: Score
    ensemble: Score
    __test__ = False  # pytest would take the class for a test


@dataclass(frozen=True)
class Summary:
    """summary.json of a finished run."""

    best_epoch: int
    best_val_accuracy: float | None = None
    best_val_loss: float | None = None
    test: Test | None = None


class RunFolder:
    """A run on disk. Every file that cannot be read, or holds something else, raises a UserError that names it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).is_file()

    def options(self) -> dict[str, Any]:
        """The content of config.json, with its checksum and version verified."""
        return read_config(self.path)

    def config(self) -> RunConfig | None:
        """The options as a RunConfig; None if the run was started from Python with a learner of your own."""
        options = self.options()
        return run_config(options, self.path) if "method" in options else None

    def epochs(self) -> list[Epoch]:
        """The metrics of the epochs finished so far."""
        return self._lines(METRICS, Epoch)

    def timings(self) -> list[Timing]:
        return self._lines(TIMINGS, Timing)

    def summary(self) -> Summary | None:
        """The result; None if the run is not finished."""
        data = self._json(SUMMARY)
        if data is None:
            return None
        found = record(Summary, data, str(self.path / SUMMARY))
        if found.test is None:
            return found
        best = record(_BestEpoch, data["test"]["best"], str(self.path / SUMMARY))
        return replace(found, test=replace(found.test, best=replace(found.test.best, epochs=(best.epoch,))))

    def divergence(self) -> Divergence | None:
        """Why the run was stopped; None if it did not diverge."""
        data = self._json(NOTE)
        return None if data is None else record(Divergence, data, str(self.path / NOTE))

    def damage(self) -> str:
        """What is wrong with the files of a finished run; "" if nothing is, or the run is not finished."""
        if not (self.path / DONE).exists():
            return ""
        try:
            if self.summary() is None:
                return f"{SUMMARY} is missing"
            sound = read_text(self.path / DONE) == self._checksums()
        except UserError as error:
            return str(error)
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return "" if sound else f"its files do not match the checksums in {DONE}"

    def holder(self) -> str | None:
        """The process that trains the run now, in words; None if none does."""
        found = locks.holder(self.path)
        return None if found is None else str(found)

    def status(self) -> Status:
        """How far the run is, from its files alone."""
        if not self.exists():
            return "running" if self.holder() else "waiting"
        if (self.path / DONE).exists():
            return "done"
        if self.holder():
            return "running"
        return "diverged" if (self.path / NOTE).exists() else "stopped"

    def _checksums(self) -> str:
        names = (CONFIG, METRICS, SUMMARY)
        return "".join(f"{sha256(read_bytes(self.path / name))}  {name}\n" for name in names)

    def _json(self, name: str) -> Any:
        """The content of a JSON file; None if there is no such file."""
        path = self.path / name
        try:
            return parse_json(read_text(path))
        except FileNotFoundError:
            return None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from None

    def _lines(self, name: str, kind: type[Line]) -> list[Line]:
        """The lines of a file with a line for each epoch; none if there is no such file."""
        path = self.path / name
        try:
            lines = read_text(path).splitlines()
        except FileNotFoundError:
            return []
        return list(_parse_lines(path, kind, lines))


@dataclass(frozen=True)
class _BestEpoch:
    epoch: int  # the best epoch alone has `epoch`, the ensemble has `epochs`


def _parse_lines(path: Path, kind: type[Line], lines: list[str]) -> Iterator[Line]:
    last = 0
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number},"
        try:
            found = record(kind, parse_json(line), where)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{where} is damaged: {error}") from None
        if found.epoch <= last:
            raise UserError(f"{where} is damaged: epoch {found.epoch} comes after epoch {last}")
        last = found.epoch
        yield found


def best_epochs(epochs: Sequence[Epoch], count: int = ENSEMBLE) -> list[int]:
    """The epochs with the best validation, best first; of two equal ones the earlier first.

    By accuracy; for regression by loss, with epochs in which fewer tasks diverged before all others.
    """

    def rank(line: Epoch) -> tuple[float, float]:
        if line.val_accuracy is not None:
            return 0, -line.val_accuracy
        return line.val_diverged, math.inf if line.val_loss is None else line.val_loss

    return [line.epoch for line in sorted(epochs, key=rank)[:count]]


def find_runs(where: Path, levels: int = 3) -> list[RunFolder]:
    """Every run folder in a folder and so many levels below it, sorted by path; a run folder is not searched."""
    folder = RunFolder(where)
    if folder.exists():
        return [folder]
    if levels == 0 or not where.is_dir():
        return []
    children = sorted(path for path in where.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [run for child in children for run in find_runs(child, levels - 1)]
