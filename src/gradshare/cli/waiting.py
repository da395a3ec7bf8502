"""For commands that take a while: how far they are, and an orderly end when they are stopped."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradshare.errors import printable, say
from gradshare.runs.workers import HardStop, Interrupted, stops_go_to

Progress = Callable[[int, int], None]  # done, in all (0: unknown)


@contextmanager
def bar(label: str, unit: str) -> Iterator[Progress]:
    """Show how far something is: a bar on a terminal, one line otherwise."""
    if not sys.stdout.isatty():
        yield _line_once(label, unit)
        return
    from rich import progress as rich

    amount = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if unit == "bytes" else (rich.MofNCompleteColumn(),)
    text = rich.TextColumn("{task.description}", markup=False)
    columns = (text, rich.BarColumn(), *amount, rich.TimeRemainingColumn())
    with rich.Progress(*columns, transient=True) as shown:
        row = shown.add_task(printable(label), total=None)
        yield lambda done, total: shown.update(row, completed=done, total=total or None)


def _line_once(label: str, unit: str) -> Progress:
    printed: list[bool] = []

    def progress(done: int, total: int) -> None:
        if not printed:
            say(f"{label}: {f'{total:,} {unit}' if total else 'of unknown size'}")
            printed.append(True)

    return progress


def load_data(dataset: str, pixels: Any) -> Any:
    """Load a data set, with a bar while one that is built in is made for the first time."""
    from gradshare.data.dataset import load_dataset

    with bar("building the data set, once", "classes") as progress:
        return load_dataset(dataset, pixels, progress)


def typed_command() -> str:
    """The command as the user typed it."""
    return f"gradshare {shlex.join(sys.argv[1:])}"


@contextmanager
def stoppable(what_is_left: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with a line that says what is left, and exit code 3."""
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True
        raise HardStop

    try:
        with stops_go_to(stop):
            yield
    except BaseException as error:
        if not (stopped or isinstance(error, KeyboardInterrupt)):  # NumPy, say, may make another error of a stop
            raise
        left = what_is_left if isinstance(what_is_left, str) else what_is_left()
        for line in f"gradshare: stopped; {left}".splitlines():
            say(line, error=True)
        raise SystemExit(3) from None


LEFT: list[Callable[[], str]] = []  # what is left of the run that this command trains, also when it has just ended


def names_what_goes_on(folder: Path, command: str, go_on: str) -> None:
    """Have a stop of this command name the command that goes on with a run.

    Args:
        command: starts the run, as long as it has no folder.
        go_on: goes on with it afterwards.
    """

    def left() -> str:
        begun = (folder / "config.json").exists()
        return f"all up to the last checkpoint is kept\nto go on: {go_on if begun else command}"

    LEFT[:] = [left]


def what_is_left() -> str:
    """How to go on with a command that is stopped before or after its run."""
    return LEFT[0]() if LEFT else f"to go on: {typed_command()}"


@contextmanager
def says_how_to_go_on(command: str) -> Iterator[None]:
    """Turn the polite stop of a run into a message with the command that goes on, and exit code 3."""
    try:
        yield
    except Interrupted as stopped:
        say(str(stopped), error=True)
        say(f"to go on: {command}", error=True)
        raise SystemExit(3) from None
