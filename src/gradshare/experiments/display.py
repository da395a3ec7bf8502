"""The live display of runs: a table on a terminal, and a line for every epoch in files and pipes.

One run, the arms of a comparison and the cells of a grid are shown in the same way.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from gradshare.errors import printable
from gradshare.experiments.grid import Activity, Cell, Follower, State, read_run, read_state
from gradshare.runs.config import Training
from gradshare.runs.display import epoch_text
from gradshare.runs.divergence import saturated
from gradshare.runs.folder import RunFolder
from gradshare.runs.records import Status

if TYPE_CHECKING:
    from rich.console import Group

REFRESH = 1.0  # seconds
AT_WORK: tuple[Status, ...] = ("running", "failed", "diverged")


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

    @classmethod
    def of_cells(cls, cells: Sequence[Cell], only: Sequence[Status] = ()) -> Self:
        return cls({cell.label: _reader(cell) for cell in cells}, only)

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
            print(printable(text), flush=True)

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
                self.say(f"{name}: saturated after epoch {epoch.epoch}: {found[0]}")


def _reader(cell: Cell) -> Callable[[], State]:
    return lambda: read_state(cell)


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


def watch(cells: Sequence[Cell]) -> None:
    """Show all cells until every one is done, diverged or failed."""
    with View.of_cells(cells) as view:
        while any(state.status not in ("done", "diverged", "failed") for state in view.states.values()):
            view.update(view.sources)
            time.sleep(REFRESH)


def status_table(states: Mapping[str, State], only: Sequence[Status] = ()) -> Group:
    """A row for each run, or for those with some status; then why runs failed or diverged; then the counts."""
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    rows = {name: _row(state) for name, state in states.items() if not only or state.status in only}
    columns = ["State", "Epoch", "Last epoch", "Best val.", "Per epoch", "Left"]
    if Console().width < 100 + max(map(len, rows), default=0):
        columns.remove("Last epoch")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("Run", overflow="fold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("State", "Last epoch") else "right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(Text(printable(name)), *(Text(row[column]) for column in columns))
    reasons = [Text(printable(f"{name}: {state.reason}")) for name, state in states.items() if state.reason]
    total = [Text(counts(states.values()))] if len(states) > 1 else []
    return Group(*([table] if rows else []), *reasons, *total)


def _row(state: State) -> dict[str, str]:
    return {
        "State": f"{state.status} {state.activity.now}".rstrip(),
        "Epoch": f"{len(state.epochs)}/{state.wanted}",
        "Last epoch": epoch_text(state.epochs[-1]) if state.epochs else "–",
        "Best val.": "–" if state.best is None else f"{state.best:.1%}",
        "Per epoch": "–" if state.epoch_seconds is None else duration(state.epoch_seconds),
        "Left": "–" if state.seconds_left is None else duration(state.seconds_left),
    }


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
