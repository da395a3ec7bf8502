"""Comparison: the arms of an experiment on the same tasks, one after the other or several at a time."""

from __future__ import annotations

import queue
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from gradshare.errors import TOO_LITTLE_MEMORY, UserError, out_of_memory, say_warnings_plainly
from gradshare.experiments.presets import arm_options
from gradshare.files import tidy
from gradshare.runs.build import run, settle
from gradshare.runs.config import Arm, RunConfig, taken_up
from gradshare.runs.display import RunDisplay, Screen
from gradshare.runs.divergence import Diverged, Divergence, read_note
from gradshare.runs.interruption import Interrupted, stop_requests
from gradshare.runs.workers import DONE, FAILED, STOPPED, Processes, side_by_side


def compare(
    config: RunConfig, arms: list[Arm], folder: Path, jobs: int, screen: Screen, longer: bool = False
) -> dict[str, Divergence]:
    """Train every arm below `folder`; finished arms are kept, unfinished ones go on where they stopped.

    An arm that diverges is a result: the others go on, and it is not tried again. Gives those that did, with the cause.
    `longer`: arms may have more epochs now than they were begun with.
    """
    begun = [taken_up(replace(config, **arm_options(config, arm)), folder / arm, longer) for arm in arms]
    jobs, threads = side_by_side(jobs, len(arms), settle(config).device)
    configs = [replace(one, threads=one.threads or threads) for one in begun]
    with tidy(folder):  # arms that leave nothing leave no folder for it
        if jobs == 1:
            for one in configs:
                _train(one, folder / one.arm, RunDisplay(screen, one.arm))
        else:
            _parallel(configs, folder, jobs, screen)
    notes = {arm: read_note(folder / arm) for arm in arms}
    return {arm: note for arm, note in notes.items() if note is not None}


def _train(config: RunConfig, folder: Path, display: RunDisplay) -> None:
    with suppress(Diverged):  # the run's folder says so
        run(config, folder, resume=None, display=display)


def _parallel(configs: list[RunConfig], folder: Path, jobs: int, screen: Screen) -> None:
    waiting = list(configs)
    failures: dict[str, tuple[str, str]] = {}
    with Processes() as arms, stop_requests() as stop:
        events: Queue[tuple[str, str, tuple[Any, ...]]] = arms.context.Queue()
        while arms.running or (waiting and not stop() and not failures):
            while waiting and len(arms.running) < jobs and not stop() and not failures:
                one = waiting.pop(0)
                arms.start(one.arm, _child, one, folder / one.arm, events)
            if stop():
                arms.ask_to_stop()
            _pass_on(events, screen, failures)
            for arm, code in arms.ended().items():
                if code not in (DONE, STOPPED):
                    failures.setdefault(arm, ("RuntimeError", f"its process ended with {code}"))
        _pass_on(events, screen, failures)
        if stop():
            raise Interrupted(folder, "between iterations")
    for arm, (kind, message) in failures.items():
        raise (
            UserError(f"arm {arm}: {message}") if kind == "UserError" else RuntimeError(f"arm {arm} failed:\n{message}")
        )


def _pass_on(events: Queue[Any], screen: Screen, failures: dict[str, tuple[str, str]]) -> None:
    """Show what the children tell, for a fifth of a second."""
    until = time.monotonic() + 0.2
    while (left := until - time.monotonic()) > 0:
        try:
            arm, kind, values = events.get(timeout=left)
        except queue.Empty:
            return
        if kind == "failed":
            failures[arm] = values
        else:
            getattr(screen, kind)(arm, *values)


class _Forwarding:
    """A screen in another process: sends what it is told to the parent."""

    def __init__(self, events: Queue[Any]) -> None:
        self.events = events

    def iteration(self, run: str, *values: Any) -> None:
        self.events.put((run, "iteration", values))

    def evaluating(self, run: str, *values: Any) -> None:
        self.events.put((run, "evaluating", values))

    def epoch(self, run: str, *values: Any) -> None:
        self.events.put((run, "epoch", values))


def _child(config: RunConfig, folder: Path, events: Queue[Any]) -> None:
    """One arm in a process of its own."""
    say_warnings_plainly()
    try:
        _train(config, folder, RunDisplay(_Forwarding(events), config.arm))
    except Interrupted:
        raise SystemExit(STOPPED) from None
    except Exception as error:
        import traceback

        told = str(error) if isinstance(error, UserError) else TOO_LITTLE_MEMORY if out_of_memory(error) else None
        events.put((config.arm, "failed", ("", traceback.format_exc()) if told is None else ("UserError", told)))
        raise SystemExit(FAILED) from None
