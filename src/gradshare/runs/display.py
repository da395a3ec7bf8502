"""What a run shows while it trains: a live table on a terminal, a line for every epoch in notebooks, files and pipes.

The arms of a comparison and the cells of a grid are shown in the same way, by `gradshare.experiments.grid`. Imports
nothing heavy.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from gradshare.errors import UserError, has_methods, printable, say, short_repr
from gradshare.runs.config import Training
from gradshare.runs.divergence import saturated
from gradshare.runs.folder import METRICS, TIMINGS, RunFolder
from gradshare.runs.records import Epoch, Status, Summary

if TYPE_CHECKING:
    from rich.console import Group

REFRESH = 1.0  # seconds
BARS, WIDTH = "▁▂▃▄▅▆▇█", 20  # of a curve on a terminal
ROOM = {"Last epoch": 120, "Per epoch": 84, "Curve": 72}  # beside the names: with less, these columns are left out


class Display(Protocol):
    """What `train` calls while it runs."""

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        """After a meta-iteration; `epoch` counts the epochs before it, `iteration` those of this epoch so far."""

    def evaluating(self, split: str, done: int, total: int) -> None:
        """After a batch of validation or test tasks."""

    def epoch(self, line: Epoch, seconds: float) -> None:
        """After an epoch with its validation; `line` is what metrics.jsonl gets."""


class Silent:
    """A display that shows nothing."""

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None: ...
    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def epoch(self, line: Epoch, seconds: float) -> None: ...


def check_display(display: Any) -> None:
    """Raise an error for what is no display."""
    methods = ("iteration", "evaluating", "epoch")
    if not (display is None or isinstance(display, bool) or has_methods(display, methods)):
        what = f"an object with the methods {', '.join(methods)}"
        raise UserError(f"display is True, False, or {what}, not {short_repr(display)}")


@contextmanager
def shown(display: Display | bool | None, name: str, run: RunFolder, training: Training) -> Iterator[Display]:
    """The display of a run while it trains.

    Args:
        display: None and True show the progress, False shows nothing; or a display of the user's own.
        name: of the run.
    """
    if display is None or display is True:
        with RunView(name, run, training) as view:
            yield view.display
        show_result(run)
    else:
        yield Silent() if display is False else display


def show_result(run: RunFolder) -> None:
    """Print the result of a finished run."""
    summary = run.summary()
    assert summary is not None, "the run is finished"
    for line in result_lines(summary, run.path):
        say(line)


def result_lines(summary: Summary, folder: Path) -> list[str]:
    """The result of a run, for people."""
    ended = "" if summary.ended is None else f" ({summary.ended})"
    lines = [f"best epoch {summary.best_epoch}{ended}; run in {folder}"]
    if summary.test is not None:
        lines += [
            f"test, best: {score_text(summary.test.best)}",
            f"test, ensemble: {score_text(summary.test.ensemble)}",
        ]
    return lines


def score_text(score: Any) -> str:
    """The accuracy, or for regression the loss, of a `Score` or an `Evaluation`, with its interval.

    Example:
        >>> from gradshare.runs.records import Score
        >>> score_text(Score(accuracy=0.5, interval=0.0123, loss=1.5))
        '50.00% ± 1.23%'
    """
    if score.accuracy is not None:
        return f"{score.accuracy:.2%} ± {score.interval:.2%}"
    if score.loss is None:
        return "no finite loss"
    return f"loss {score.loss:.4g}" + ("" if score.interval is None else f" ± {score.interval:.2g}")


def epoch_text(line: Epoch) -> str:
    """An epoch in words: validation with its interval, or the training where there is none, and the mean gates.

    Example:
        >>> epoch_text(Epoch(1, val_accuracy=0.5, val_interval=0.01, lam=(0.25, 0.75), skipped=2))
        'val 50.0% ±1.0% σ(λ) 0.50 skipped 2'
        >>> epoch_text(Epoch(1, train_accuracy=0.5, train_loss=1.25))
        'train 50.0% loss 1.25'
    """
    if line.val_accuracy is not None:
        parts = [f"val {line.val_accuracy:.1%} ±{line.val_interval or 0:.1%}"]
    elif line.val_loss is not None:
        parts = [f"val loss {line.val_loss:.4g}" + ("" if line.val_interval is None else f"±{line.val_interval:.2g}")]
    elif line.validated:
        parts = ["no finite val loss"]
    else:
        accuracy = [] if line.train_accuracy is None else [f"{line.train_accuracy:.1%}"]
        parts = ["train", *accuracy, "no finite loss" if line.train_loss is None else f"loss {line.train_loss:.4g}"]
    parts += [f"{s} {sum(gates) / len(gates):.2f}" for s, gates in (("σ(m)", line.m), ("σ(λ)", line.lam)) if gates]
    return " ".join(parts + ([f"skipped {line.skipped}"] if line.skipped else []))


@dataclass(frozen=True)
class Activity:
    """What a run does now."""

    share: float = 0.0  # of the epoch's iterations
    now: str = ""
    epoch_seconds: float | None = None  # that an epoch's iterations will take


@dataclass(frozen=True)
class State:
    """How far a run is."""

    status: Status
    epochs: tuple[Epoch, ...]  # finished
    seconds: tuple[float, ...]  # of each epoch finished, with validation
    wanted: int  # epochs in all
    activity: Activity = Activity()
    reason: str = ""  # why it failed or diverged

    @property
    def best(self) -> float | None:
        """The best validation accuracy."""
        return max((epoch.val_accuracy for epoch in self.epochs if epoch.val_accuracy is not None), default=None)

    @property
    def curve(self) -> list[float]:
        """Validation accuracy, or loss where there is none, of every epoch; NaN without a value."""
        found = [epoch.val_loss if epoch.val_accuracy is None else epoch.val_accuracy for epoch in self.epochs]
        return [math.nan if value is None else value for value in found]

    @property
    def epoch_seconds(self) -> float | None:
        """What an epoch takes: the mean of the newest five."""
        newest = self.seconds[-5:]
        return sum(newest) / len(newest) if newest else self.activity.epoch_seconds

    @property
    def seconds_left(self) -> float | None:
        each = self.epoch_seconds
        if each is None or self.status in ("done", "diverged"):
            return None
        return max(0.0, each * (self.wanted - len(self.epochs) - self.activity.share))


def read_run(run: RunFolder, wanted: int, activity: Activity) -> State:
    """How far a run is that this process trains; training itself repairs or names damaged files."""
    try:
        return State(run.status(), *read_lines(run.path), wanted, activity)
    except UserError as error:
        return State("stopped", (), (), wanted, activity, str(error))


def read_lines(folder: Path) -> tuple[tuple[Epoch, ...], tuple[float, ...]]:
    """The epochs of a run, and the seconds of each."""
    paths = [path for path in (folder / METRICS, folder / TIMINGS) if path.exists()]
    return _lines(folder, tuple((found.st_mtime_ns, found.st_size) for found in map(Path.stat, paths)))


@lru_cache(maxsize=1024)  # a display reads hundreds of runs every second, and a line is new once in an epoch
def _lines(folder: Path, stamps: tuple[tuple[int, int], ...]) -> tuple[tuple[Epoch, ...], tuple[float, ...]]:
    """`stamps` change when a file with a line for each epoch is written anew."""
    run = RunFolder(folder)
    return tuple(run.epochs()), tuple(timing.train_seconds + timing.val_seconds for timing in run.timings())


class Follower:
    """The display of a run: passes on what the run does now, about twice a second and after every epoch."""

    PAUSE = 0.5  # seconds

    def __init__(self, training: Training, pass_on: Callable[[Activity], None]) -> None:
        self.iterations, self.pass_on = training.iterations, pass_on
        self.began: tuple[int, int, float] | None = None  # epoch, iteration and time of its first iteration seen
        self.epoch_seconds: float | None = None
        self.passed_on = 0.0

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        now = time.monotonic()
        if self.began is None or self.began[0] != epoch:
            self.began = (epoch, iteration, now)
        elif iteration > self.began[1]:
            self.epoch_seconds = (now - self.began[2]) / (iteration - self.began[1]) * self.iterations
        self._pass_on(iteration / self.iterations, f"{iteration}/{self.iterations}")

    def evaluating(self, split: str, done: int, total: int) -> None:
        self._pass_on(1.0, f"{split} {done}/{total}")

    def epoch(self, *_: Any) -> None:
        self.passed_on = 0.0
        self._pass_on(0.0, "")

    def _pass_on(self, share: float, now: str) -> None:
        if time.monotonic() - self.passed_on >= self.PAUSE:
            self.passed_on = time.monotonic()
            self.pass_on(Activity(share, now, self.epoch_seconds))


class View:
    """Shows how far runs are.

    Args:
        sources: for each run, by name, what reads its state.
        only: on a terminal, the runs with a row in the table; the last line counts all.
    """

    def __init__(self, sources: Mapping[str, Callable[[], State]], only: Sequence[Status] = ()) -> None:
        self.sources, self.only = sources, only
        self.states = {name: read() for name, read in sources.items()}
        self.shown = {name: len(state.seconds) for name, state in self.states.items()}  # epochs that need no line
        self.width = max(11, *map(len, sources))
        self.warned: set[str] = set()
        self.changed: set[str] = set()
        self.live: Any = None
        self.next = 0.0

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(auto_refresh=False).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.next = 0.0
        try:
            self.update(self.sources)
        finally:
            if self.live is not None:
                self.live.__exit__(*error)

    def update(self, names: Iterable[str]) -> None:
        """Show the runs that may have changed; about once a second those of all calls since."""
        self.changed.update(names)
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + REFRESH
        for name in [name for name in self.sources if name in self.changed]:
            self.states[name] = self.sources[name]()
            self._show_epochs(name, self.states[name])
        self.changed.clear()
        if self.live is not None:
            self.live.update(status_table(self.states, self.only), refresh=True)

    def say(self, text: str) -> None:
        """Print a line; on a terminal above the table."""
        if self.live is not None:
            self.live.console.print(printable(text), markup=False, highlight=False)
        else:
            say(text)

    def _show_epochs(self, name: str, state: State) -> None:
        new = list(zip(state.epochs, state.seconds, strict=False))[self.shown[name] :]  # an epoch's time comes last
        self.shown[name] = min(len(state.epochs), len(state.seconds))
        for epoch, seconds in new:
            if self.live is None:
                place = f"{name:<{self.width}}  epoch {epoch.epoch}/{state.wanted}"
                self.say(f"{place}  {epoch_text(epoch)}  {seconds:.1f} s")
            found = saturated(epoch)
            if found and name not in self.warned:
                self.warned.add(name)
                self.say(f"{name}: saturated after epoch {epoch.epoch}: {found}")


class RunView(View):
    """Shows a run that this process trains; `display` is what training takes."""

    def __init__(self, name: str, run: RunFolder, training: Training) -> None:
        self.activity = Activity()
        super().__init__({name: lambda: read_run(run, training.epochs, self.activity)})
        self.display = Follower(training, self._follow)

    def _follow(self, activity: Activity) -> None:
        self.activity = activity
        if not activity.now:  # an epoch is over
            self.next = 0.0
        self.update(self.sources)


def status_table(states: Mapping[str, State], only: Sequence[Status] = ()) -> Group:
    """A row for each run, or for those with some status; then why runs failed or diverged; then the counts.

    The curves of all rows have one scale, from the lowest to the highest validation value.
    """
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    chosen = {name: state for name, state in states.items() if not only or state.status in only}
    values = [value for state in chosen.values() for value in state.curve if math.isfinite(value)]
    limits = (min(values), max(values)) if values else (0.0, 0.0)
    rows = {name: _row(state, limits) for name, state in chosen.items()}
    columns = ["State", "Epoch", "Curve", "Last epoch", "Best val.", "Per epoch", "Left"]
    room = Console().width - max(map(len, rows), default=0)
    columns = [one for one in columns if room >= ROOM.get(one, 0) and (values or one != "Curve")]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("Run", overflow="fold")
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("State", "Curve", "Last epoch") else "right", no_wrap=True
        )
    for name, row in rows.items():
        table.add_row(Text(printable(name)), *(Text(row[column]) for column in columns))
    reasons = [Text(printable(f"{name}: {state.reason}")) for name, state in states.items() if state.reason]
    total = [Text(counts(states.values()))] if len(states) > 1 else []
    return Group(*([table] if rows else []), *reasons, *total)


def _row(state: State, limits: tuple[float, float]) -> dict[str, str]:
    return {
        "State": f"{state.status} {state.activity.now}".rstrip(),
        "Epoch": f"{len(state.epochs)}/{state.wanted}",
        "Curve": sparkline(state.curve, *limits, each=math.ceil(state.wanted / WIDTH)) or "–",
        "Last epoch": epoch_text(state.epochs[-1]) if state.epochs else "–",
        "Best val.": "–" if state.best is None else f"{state.best:.1%}",
        "Per epoch": "–" if state.epoch_seconds is None else duration(state.epoch_seconds),
        "Left": "–" if state.seconds_left is None else duration(state.seconds_left),
    }


def sparkline(values: Sequence[float], low: float, high: float, each: int = 1) -> str:
    """A curve as a line of text: a bar for the mean of so many values.

    Example:
        >>> sparkline([0.2, 0.3, math.nan, 0.5, 0.6], 0.2, 0.6), sparkline(range(16), 0, 15, each=2)
        ('▁▃ ▆█', '▁▂▃▄▅▆▇█')
    """
    parts = [values[start : start + each] for start in range(0, len(values), each)]
    means = [sum(part) / len(part) for part in parts]
    shares = [(mean - low) / (high - low) if high > low else 0.5 for mean in means]
    return "".join(BARS[round(share * (len(BARS) - 1))] if math.isfinite(share) else " " for share in shares)


def counts(states: Iterable[State]) -> str:
    """How many runs have which status, such as `3 runs: 2 done, 1 failed`."""
    found = Counter(state.status for state in states)
    each = ", ".join(f"{number} {status}" for status, number in found.items())
    return f"{found.total()} run{'s' * (found.total() != 1)}: {each}"


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(0.123), duration(12.34), duration(63), duration(7300)
        ('0.12 s', '12.3 s', '1m 03s', '2h 01m')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
