"""How far the cells of a grid are: a table, live or once, and a line an epoch where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gradshare.errors import printable
from gradshare.experiments.cells import Cell, Condition, State, read_state
from gradshare.reports.wording import count
from gradshare.reports.wording import seconds as in_words
from gradshare.runs.display import summary_of

if TYPE_CHECKING:
    from rich.console import Group

COLUMNS = ("Cell", "State", "Epoch", "Best val.", "Per epoch", "Left")
REFRESH = 1.0  # seconds


def status_table(states: Sequence[tuple[Cell, State]], only: Sequence[Condition] = ()) -> Group:
    """A row a cell, or those in some states only; then why cells failed or diverged, and how many are in what state."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in COLUMNS:
        left = name in ("Cell", "State")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=name != "Cell")
    for cell, state in states:
        if only and state.condition not in only:
            continue
        table.add_row(*(Text(printable(text)) for text in _row(cell, state)))
    reasons = [
        Text(printable(f"{cell.label}: {state.now}"))
        for cell, state in states
        if state.condition in ("failed", "diverged")
    ]
    return Group(*([table] if table.row_count else []), *reasons, Text(counted(state for _, state in states)))


def counted(states: Iterable[State]) -> str:
    """How many cells are in which state, in words."""
    counts = Counter(state.condition for state in states)
    each = ", ".join(f"{number} {condition}" for condition, number in counts.items())
    return f"{count(counts.total(), 'cell')}: {each}"


def _row(cell: Cell, state: State) -> list[str]:
    now = f" {state.now}" if state.condition == "running" and state.now else ""
    return [
        cell.label,
        f"{state.condition}{now}",
        f"{state.epoch}/{state.epochs}",
        "–" if state.best is None else f"{state.best:.1%}",
        "–" if state.epoch_seconds is None else in_words(state.epoch_seconds),
        "–" if state.seconds_left is None else in_words(state.seconds_left),
    ]


def watch(cells: Sequence[Cell], every: float = REFRESH) -> None:
    """Show the table again and again, until every cell is done, diverged or failed, or a Ctrl-C."""
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            states = [(cell, read_state(cell)) for cell in cells]
            live.update(status_table(states), refresh=True)
            if all(state.condition in ("done", "diverged", "failed") for _, state in states):
                return
            time.sleep(every)


class PlainScreen:
    """A line for every epoch that a cell finishes, for files and pipes."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = {cell.label: cell for cell in cells}
        self.said = {label: read_state(cell).epoch for label, cell in self.cells.items()}
        self.next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines()

    def update(self) -> None:
        if time.monotonic() >= self.next:
            self._lines()
            self.next = time.monotonic() + REFRESH

    def say(self, text: str) -> None:
        self._lines()
        print(text, flush=True)

    def _lines(self) -> None:
        for label, cell in self.cells.items():
            if self.said[label] == cell.config.epochs:
                continue
            state = read_state(cell)
            for metrics, seconds in zip(state.metrics, state.seconds, strict=False):
                if metrics["epoch"] > self.said[label]:
                    place = f"epoch {metrics['epoch']}/{state.epochs}"
                    print(f"{label}  {place}  {summary_of(metrics)}  {seconds:.1f} s", flush=True)
                    self.said[label] = metrics["epoch"]


class LiveScreen:
    """The table of the cells at work, and of those that failed or diverged."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        from rich.live import Live

        self.cells = cells
        self.live = Live(auto_refresh=False)
        self.next = 0.0

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        self.live.__exit__(kind, error, trace)

    def update(self) -> None:
        if time.monotonic() >= self.next:
            self._show()
            self.next = time.monotonic() + REFRESH

    def say(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False)

    def _show(self) -> None:
        states = [(cell, read_state(cell)) for cell in self.cells]
        self.live.update(status_table(states, only=("running", "failed", "diverged")), refresh=True)


def screen(cells: Sequence[Cell]) -> PlainScreen | LiveScreen:
    """The screen that fits where the output goes."""
    return LiveScreen(cells) if sys.stdout.isatty() else PlainScreen(cells)
