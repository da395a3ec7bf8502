"""Processes that train side by side. Each saves when it is asked to stop, and its exit code says how it ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any, Self

from gradshare.runs.interruption import become_worker

DONE, FAILED, STOPPED = 0, 1, 3  # exit codes; any other, or a signal's number below 0: the process died


def one_of_several() -> bool:
    """Whether this process works with others on one run, as torchrun, or whatever started it, tells it."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


class Processes:
    """The processes at work, by name; those still there when the block ends are killed."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.running: dict[str, SpawnProcess] = {}
        self._asked: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.join()

    def start(self, name: str, target: Callable[..., object], *arguments: Any) -> None:
        """Start a process; it does not hear Ctrl-C.

        A Ctrl-C reaches every process of the terminal; the parent alone answers it, by asking its children to stop.
        """
        process = self.context.Process(target=_work, args=(target, *arguments))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit what is ignored
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        self.running[name] = process

    def ask_to_stop(self) -> None:
        """Have every process save and end; each is asked once."""
        for name, process in self.running.items():
            if process.is_alive() and name not in self._asked:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGTERM)
                self._asked.add(name)

    def ended(self) -> dict[str, int]:
        """The exit codes of those that ended since the last call."""
        codes = {name: process.exitcode for name, process in self.running.items() if not process.is_alive()}
        for name in codes:
            del self.running[name]
            self._asked.discard(name)
        return {name: -1 if code is None else code for name, code in codes.items()}


def _work(target: Callable[..., object], *arguments: Any) -> None:
    become_worker()
    target(*arguments)


def own_cores() -> int:
    """Cores that this process may use: a scheduler often gives it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(jobs: int, count: int, device: str) -> tuple[int, int]:
    """How many of `count` trainings to run at a time, and the threads of each; `jobs` is the wish, 0 for none.

    On a CPU two trainings side by side, a core each, beat one on all cores; a GPU is best used by one.
    """
    cores = own_cores()
    jobs = min(jobs or (cores if device == "cpu" else 1), count)
    return jobs, max(1, cores // jobs)
