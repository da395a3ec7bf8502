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

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradshare.errors import DamageWarning, UserError
from gradshare.files import (
    NEW,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    reading,
    record,
    sha256,
    sync,
    tidy,
    write_whole,
    writing,
)
from gradshare.runs import checkpoints, locks
from gradshare.runs.config import (
    FINGERPRINT,
    RunConfig,
    check_same_learner,
    check_same_options,
    grows,
    identity,
    options_text,
    parse_config,
    parse_options,
)
from gradshare.runs.divergence import Diverged
from gradshare.runs.records import (
    ENSEMBLE,
    Divergence,
    Epoch,
    Progress,
    Score,
    Status,
    Summary,
    Test,
    Timing,
    best_epochs,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gradshare.runs.checkpoints import Checkpoint

__all__ = ["ENSEMBLE", "Divergence", "Epoch", "Progress", "RunFolder", "Score", "Status", "Summary", "Test", "Timing"]
__all__ += ["best_epochs", "find_runs", "merge_with_saved", "next_free"]

CONFIG, METRICS, TIMINGS, SUMMARY, DONE = "config.json", "metrics.jsonl", "timings.jsonl", "summary.json", "DONE"
NOTE = "diverged.json"
Line = TypeVar("Line", Epoch, Timing)


@dataclass(frozen=True)
class RunFolder:
    """A run on disk. Every file that cannot be read, or holds something else, raises a UserError that names it."""

    path: Path

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).is_file()

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return (self.path / DONE).exists()

    def options(self) -> dict[str, Any]:
        """The content of config.json, with its checksum and version verified."""
        path = self.path / CONFIG
        try:
            content = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is not a run: it has no {CONFIG}") from None
        return parse_options(content, path)

    def config(self) -> RunConfig | None:
        """The options as a RunConfig; None if the run was started from Python with a learner of your own."""
        options = self.options()
        return parse_config(options, self.path / CONFIG) if "method" in options else None

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
        if not self.done:
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
        return locks.holder(self.path)

    def status(self) -> Status:
        """How far the run is, from its files alone."""
        if not self.exists():
            return "running" if self.holder() else "waiting"
        if self.done:
            return "done"
        if self.holder():
            return "running"
        return "diverged" if (self.path / NOTE).exists() else "stopped"

    def has_checkpoint(self) -> bool:
        """Whether the run has a state to continue from."""
        return bool(checkpoints.listing(self.checkpoint_folder))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is not damaged; None if the run has none yet."""
        return checkpoints.newest(self.checkpoint_folder, identity(self.options()))

    def load_epoch(self, epoch: int) -> dict[str, Tensor]:
        """The tensors of the run at the end of an epoch."""
        path = checkpoints.of_epoch(self.checkpoint_folder, epoch)
        if not path.exists():
            kept = ", ".join(path.name for path in checkpoints.listing(self.checkpoint_folder)) or "none"
            raise UserError(f"the run in {self.path} has no checkpoint of epoch {epoch}; there are {kept}")
        try:
            return checkpoints.load(path, identity(self.options()))[1]
        except checkpoints.Damaged as error:
            raise checkpoints.Damaged(
                f"{error}; epoch {epoch} is needed: restore it from a copy, or start the run again in another folder"
            ) from None

    # The rest is for training, which holds the lock of the folder.

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"

    def open(
        self,
        options: dict[str, Any],
        resume: bool | None,
        check: Callable[[], None],
        rate_falls: bool = False,
    ) -> Checkpoint | None:
        """Start a run here, or find the newest checkpoint of the run that is here.

        Args:
            resume: True: there must be a run; False: there must be none; None: either.
            check: raises an error for options that cannot be trained; called before a new run is written.
            rate_falls: as `check_same_options` has it. Options that make the run longer are allowed; `extend` then
                writes them.
        """
        if self.exists() and resume is False:
            raise UserError(f"{self.path} already holds a run: resume it (resume=True), or choose another folder")
        if not self.exists() and not resume:
            self._start(options, check)
            return None
        wanted = json.loads(json.dumps(options, default=str))
        stored = self.options()
        check_same_options(self.path, stored, wanted, longer=True, rate_falls=rate_falls)
        check_same_learner(self.path, stored.get(FINGERPRINT), wanted.get(FINGERPRINT))
        with writing(self.path):
            checkpoints.recover(self.checkpoint_folder)
        found = self.newest()
        if found is None and (self.done or self.epochs()):
            raise UserError(
                f"the run in {self.path} has trained, but its checkpoints are gone: restore them from a copy,"
                " or start the run again in another folder"
            )
        return found

    def _start(self, options: dict[str, Any], check: Callable[[], None]) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another folder")
        if self.path.exists() and any(path.name != f".{CONFIG}{NEW}" for path in self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and not a run; choose another folder")
        check()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync(self.path.parent)
        write_whole(self.path / CONFIG, options_text(options))

    @contextmanager
    def remove_if_nothing_to_resume(self) -> Iterator[None]:
        """Remove the folder of a new run that fails before its first checkpoint: the next try may be another run."""
        new = not self.exists()
        with tidy(self.path):
            try:
                yield
            except Exception:
                if new and self.exists() and not self.checkpoint_folder.exists():
                    (self.path / CONFIG).unlink()
                raise

    def check_not_diverged(self) -> None:
        """Raise `Diverged` for a run that diverged: resumed, it would do so again."""
        if (found := self.divergence()) is not None:
            raise Diverged(
                f"the run in {self.path} diverged: {found}; train with a lower rate in another folder, or delete"
                f" {self.path / NOTE} to resume it anyway, from {found.checkpoint}"
            )

    def extend(self, options: dict[str, Any]) -> None:
        """Write the options of a run that is to become longer.

        The result goes first: a process killed in between leaves an unfinished run with the old options.
        """
        if not grows(self.options(), options):
            return
        with writing(self.path):
            for name in (DONE, SUMMARY):
                (self.path / name).unlink(missing_ok=True)
                sync(self.path)
        write_whole(self.path / CONFIG, options_text(options))

    def roll_back_to(self, progress: Progress, over: bool) -> None:
        """Make all files agree with the checkpoint that the run continues from; `over`: no epoch is left to train."""
        with writing(self.path):
            checkpoints.set_aside(self.checkpoint_folder, progress)
            checkpoints.prune(self.checkpoint_folder, best_epochs(progress.metrics))
            for left in self.path.glob(f".*{NEW}"):
                left.unlink()
            self._write_lines(progress)
            damage = self.damage()
            if self.done and (damage or not over):
                (self.path / DONE).unlink()
        if damage and over:
            _warn(f"the run in {self.path} is damaged: {damage}; it is tested again")
        best = best_epochs(progress.metrics)  # the test needs all of them; a finished run keeps the first for use
        lost = [epoch for epoch in best if not checkpoints.of_epoch(self.checkpoint_folder, epoch).exists()]
        for epoch in best[:1] if self.done else lost:
            try:
                self.load_epoch(epoch)
            except UserError as error:
                meaning = "the result of the run stands" if self.done else "the test needs it, unless others are better"
                _warn(f"{error}; {meaning}")

    def save(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Write a checkpoint."""
        self._check_still_here(progress.run)
        checkpoints.save(self.checkpoint_folder, progress, tensors)

    def _check_still_here(self, run: str) -> None:
        """Raise an error if the folder was moved or deleted; also if another run was started in its place."""
        if not self.exists() or identity(self.options()) != run:
            raise UserError(f"{self.path} was moved or deleted while its run trained: resume the run where it is now")

    def write_epoch(self, progress: Progress) -> None:
        """Bring the other files up to date with the checkpoint of an epoch that was just saved."""
        self._write_lines(progress)
        checkpoints.prune(self.checkpoint_folder, best_epochs(progress.metrics))

    def _write_lines(self, progress: Progress) -> None:
        files = {METRICS: [line.as_json() for line in progress.metrics], TIMINGS: map(asdict, progress.timings)}
        for name, lines in files.items():
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            write_whole(self.path / name, text)

    def write_divergence(self, found: Divergence) -> None:
        """Note why the run is stopped."""
        write_whole(self.path / NOTE, json.dumps(asdict(found), indent=2, allow_nan=False) + "\n")

    def finish(self, summary: Summary, run: str) -> None:
        """Write the result of a run, by its `config.identity`."""
        self._check_still_here(run)
        write_whole(self.path / SUMMARY, json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n")
        write_whole(self.path / DONE, self._checksums())

    def _checksums(self) -> str:
        names = (CONFIG, METRICS, SUMMARY)
        return "".join(f"{sha256(read_bytes(self.path / name))}  {name}\n" for name in names)

    def _json(self, name: str) -> Any:
        """The content of a JSON file; None if there is no such file."""
        try:
            return read_json(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _lines(self, name: str, kind: type[Line]) -> list[Line]:
        """The lines of a file with a line for each epoch; none if there is no such file."""
        path = self.path / name
        try:
            lines = read_text(path).splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
        return list(_parse_lines(path, kind, lines))


@dataclass(frozen=True)
class _BestEpoch:
    epoch: int  # the best epoch alone has `epoch`, the ensemble has `epochs`


def _parse_lines(path: Path, kind: type[Line], lines: list[str]) -> Iterator[Line]:
    last = 0
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number},"
        with reading(f"{where} is damaged"):
            found = record(kind, parse_json(line), where)
        if found.epoch <= last:
            raise UserError(f"{where} is damaged: epoch {found.epoch} comes after epoch {last}")
        last = found.epoch
        yield found


def find_runs(where: Path, levels: int = 3) -> list[RunFolder]:
    """Every run folder in a folder and so many levels below it, sorted by path; a run folder is not searched."""
    folder = RunFolder(where)
    if folder.exists():
        return [folder]
    if levels == 0 or not where.is_dir():
        return []
    children = sorted(path for path in where.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [run for child in children for run in find_runs(child, levels - 1)]


def next_free(parent: Path) -> Path:
    """The first of run-1, run-2, ... that does not exist."""
    return next(path for number in count(1) if not (path := parent / f"run-{number}").exists())


def merge_with_saved(config: RunConfig, folder: Path, longer: bool = False) -> RunConfig:
    """A configuration with what it leaves open (device, threads, ...) as the run in a folder has it, if there is one.

    Raises an error if the run has other options. `longer` allows more epochs than it has.
    """
    saved = RunFolder(folder)
    if not saved.exists():
        return config
    stored = saved.config()
    if stored is None:
        raise UserError(f"the run in {folder} was started from Python, so the command line cannot resume it")
    left_open = [name for name, value in vars(config).items() if value == "auto" or (name, value) == ("threads", 0)]
    merged = replace(config, **{name: getattr(stored, name) for name in left_open})
    check_same_options(folder, asdict(stored), asdict(merged), longer, config.rate_falls)
    return merged


def _warn(text: str) -> None:
    warnings.warn(text, DamageWarning, stacklevel=3)
