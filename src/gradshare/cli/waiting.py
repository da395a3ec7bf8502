"""For commands that take a while: how far they are, and a tidy end when they are stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradshare.runs.interruption import AtOnce, Interrupted

Progress = Callable[[int, int], None]  # done, in all (0: nobody knows)


@contextmanager
def bar(label: str, unit: str) -> Iterator[Progress]:
    """Shows how far something is: a bar on a terminal, one line otherwise."""
    if not sys.stdout.isatty():
        said: list[bool] = []

        def say_once(done: int, total: int) -> None:
            if not said:
                print(f"{label}: {f'{total:,} {unit}' if total else 'of unknown size'}", flush=True)
                said.append(True)

        yield say_once
        return
    from rich import progress as rich

    amount = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if unit == "bytes" else (rich.MofNCompleteColumn(),)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *amount, rich.TimeRemainingColumn())
    with rich.Progress(*columns, transient=True) as shown:
        row = shown.add_task(label, total=None)
        yield lambda done, total: shown.update(row, completed=done, total=total or None)


@contextmanager
def stoppable(what_is_left: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block tidily: what is left in a few words, and exit code 3."""

    def stop(number: int, frame: Any) -> None:
        raise AtOnce

    wanted = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    except KeyboardInterrupt:
        told = what_is_left if isinstance(what_is_left, str) else what_is_left()
        print(f"gradshare: stopped; {told}", file=sys.stderr)
        raise SystemExit(3) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stoppable_run(folder: Path, command: str, go_on: str) -> Iterator[None]:
    """Where there is nothing to save first, or on a second Ctrl-C, a run is stopped at once; also tells how to go on.

    Args:
        command: what starts the run, until its folder is one.
        go_on: what goes on with it, from then on.
    """

    def told() -> str:
        begun = (folder / "config.json").exists()
        return f"all up to the last checkpoint is kept\nto go on: {go_on if begun else command}"

    with stoppable(told):
        yield


@contextmanager
def says_how_to_go_on(command: str) -> Iterator[None]:
    """Turns the polite stop of a run into a message with the command that goes on, and exit code 3."""
    try:
        yield
    except Interrupted as stopped:
        print(f"{stopped}\nto go on: {command}", file=sys.stderr)
        raise SystemExit(3) from None
