"""Moments of a run at which something can go wrong: every file operation below a folder, every draw of tasks.

A `Trap` counts them in a child, and acts at the n-th, or from the n-th on. A write is caught half-way.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gradshare.data import dataset

WRITING = ("create", "write", "fsync", "mkdir", "rename", "replace", "link")  # what needs room on a disk


class Moment(NamedTuple):
    """What a run is about to do; for a write, is in the middle of."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind} {self.where}"


Action = Callable[[Moment], object]


class Trap:
    """Acts at the n-th moment below a folder; `n` = 0 never does.

    Args:
        onwards: acts at each later one too, as a disk that is full stays full.
        kinds: which moments count; () for all.
        record: a file for all moments, as they come.
    """

    def __init__(
        self,
        folder: Path,
        n: int = 0,
        act: Action = lambda moment: None,
        onwards: bool = False,
        kinds: tuple[str, ...] = (),
        record: Path | None = None,
    ) -> None:
        self.folder, self.n, self.act, self.onwards, self.kinds, self.record = folder, n, act, onwards, kinds, record
        self.count = 0

    def __call__(self, kind: str, where: str) -> None:
        if (self.kinds and kind not in self.kinds) or not where.startswith((str(self.folder), "tasks")):
            return
        self.count += 1
        moment = Moment(kind, where.removeprefix(f"{self.folder}/"))
        if self.record is not None:
            with REAL_OPEN(self.record, "a") as file:
                file.write(json.dumps(moment) + "\n")
        if self.n and (self.count == self.n or (self.onwards and self.count > self.n)):
            self.act(moment)

    def set(self) -> None:
        """Have every file operation of this process, and every draw of tasks, pass by this trap."""
        global _trap
        _trap = self
        for name, kind in OPERATIONS.items():
            setattr(os, name, _passing(getattr(os, name), kind))
        io.open = builtins.open = _open  # type: ignore[assignment]
        dataset.Dataset.sample = _sample  # type: ignore[method-assign]
        dataset.read_index = _read_index


def recorded(path: Path) -> list[Moment]:
    return [Moment(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def die(moment: Moment) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def send(*numbers: int) -> Action:
    """The process is sent these signals."""

    def act(moment: Moment) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return act


def fail(error: int, folder: Path) -> Action:
    """The operation fails, as the system has it: a write and an fsync do not know of which file."""

    def act(moment: Moment) -> None:
        named = () if moment.kind in ("write", "fsync") else (str(folder / moment.where),)
        raise OSError(error, os.strerror(error), *named)

    return act


OPERATIONS = {
    "mkdir": "mkdir",
    "rename": "rename",
    "replace": "rename",
    "link": "link",
    "unlink": "remove",
    "remove": "remove",
    "rmdir": "remove",
    "fsync": "fsync",
    "utime": "utime",
    "open": "read",
}
REAL_OPEN, REAL_SAMPLE, REAL_INDEX, REAL_OS_OPEN = open, dataset.Dataset.sample, dataset.read_index, os.open
_trap: Trap


def _where(path: Any, dir_fd: int | None = None) -> str:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    return os.path.abspath(os.path.join(base, os.fspath(path)))


def _passing(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def passing(*arguments: Any, **named: Any) -> Any:
        creates = function is REAL_OS_OPEN and len(arguments) > 1 and arguments[1] & os.O_CREAT
        _trap("create" if creates else kind, _where(arguments[0], named.get("dir_fd")))
        return function(*arguments, **named)

    return passing


class _HalfWay(io.FileIO):
    """A file whose writes are caught half-way."""

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        half = len(view) // 2
        super().write(view[:half])
        _trap("write", _where(str(self.name)))
        super().write(view[half:])
        return len(view)


def _open(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **named: Any) -> Any:
    if isinstance(file, int):
        return REAL_OPEN(file, mode, buffering, encoding, *rest, **named)
    where = _where(file)
    if "+" in mode or not set(mode) & set("wxa") or not where.startswith(str(_trap.folder)):
        _trap("read", where)
        return REAL_OPEN(file, mode, buffering, encoding, *rest, **named)
    _trap("create", where)
    writer = io.BufferedWriter(_HalfWay(where, mode.replace("b", "").replace("t", "")))
    return writer if "b" in mode else io.TextIOWrapper(writer, encoding=encoding)


def _sample(self: Any, split: str, *rest: Any) -> Any:
    _trap(split, "tasks")
    return REAL_SAMPLE(self, split, *rest)


def _read_index(folder: Path) -> Any:
    _trap("load", "tasks")
    return REAL_INDEX(folder)
