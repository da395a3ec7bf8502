"""The command line in tests: as a process of its own, in this process, and with workers that train in this process."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import pytest

from gradshare.cli.app import main
from gradshare.experiments import supervise
from gradshare.experiments.grid import Cell
from gradshare.experiments.supervise import Ended, train_cell
from gradshare.runs import locks

SIZES = {"ways": 3, "queries": 3, "tasks": 2, "steps": 2, "filters": 3, "val-tasks": 6, "test-tasks": 6, "threads": 1}
SMALL = [word for option, value in SIZES.items() for word in (f"--{option}", str(value))]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gradshare", *map(str, words)]


def gradshare(*words: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process, which must end with this exit code and without a traceback."""
    result = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def started(*words: object) -> subprocess.Popen[str]:
    """The command line as a process of its own session, which a signal can reach as a whole."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*words), start_new_session=True, **pipes)


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def epochs_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def worker(folder: Path) -> int:
    """The process that trains a run; 0 while none does."""
    found = re.match(r"process (\d+)", locks.holder(folder) or "")
    return int(found[1]) if found else 0


class Called(NamedTuple):
    out: str
    err: str


def call(*words: object, code: int = 0) -> Called:
    """Run the command line in this process, which must end with this exit code."""
    out, err = io.StringIO(), io.StringIO()
    ended: Any = 0
    with patch("sys.argv", ["gradshare", *map(str, words)]), patch("sys.stdout", out), patch("sys.stderr", err):
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
    assert ended == code, (words, ended, out.getvalue(), err.getvalue())
    return Called(out.getvalue(), err.getvalue())


def mistake(*words: object) -> str:
    """What the command line, in this process, says to a mistake: exit code 2 and one line."""
    said = call(*words, code=2).err
    assert said.startswith("gradshare: ") and said.count("\n") == 1, said
    return said


class Here:
    """An engine that trains each cell in this process when it is started; `train_here` puts it in Local's place."""

    def __init__(self, jobs: int, allowed: Sequence[str] = (), log: Any = None) -> None:
        self.allowed, self.log = allowed, log
        self.over: list[Ended] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def ask_to_stop(self) -> None: ...

    @property
    def busy(self) -> list[Cell]:
        return [ended.cell for ended in self.over]

    @property
    def room(self) -> bool:
        return not self.over

    def start(self, cell: Cell) -> None:
        self.over.append(Ended(cell, train_cell(cell, self.allowed, self.log)))

    def ended(self) -> list[Ended]:
        ended, self.over = self.over, []
        return ended


def train_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `compare` and `grid run` train in this process: a worker process costs seconds for its imports."""
    monkeypatch.setattr(supervise, "Local", Here)
    monkeypatch.setattr(supervise, "TICK", 0.0)


def seconds_of_children() -> float:
    """CPU time of the processes that a test started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system
