"""Comparison: the arms of an experiment on the same tasks, one after the other or several at a time."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from gradshare.config import Arm, RunConfig
from gradshare.display import RunDisplay, Screen
from gradshare.errors import UserError
from gradshare.interruption import Interrupted, stop_requests
from gradshare.runs import run, settle

CONTROLS: tuple[Arm, ...] = ("half-rate", "gate-only", "batch-only", "memory-only")


def compare(config: RunConfig, arms: list[Arm], folder: Path, jobs: int, screen: Screen) -> None:
    """Train every arm below `folder`; finished arms are kept, unfinished ones go on where they stopped."""
    cores = os.cpu_count() or 1
    device = settle(config).device
    # On a CPU two arms side by side, a core each, beat one arm on all cores; a GPU is best used by one.
    jobs = min(jobs or (cores if device == "cpu" else 1), len(arms))
    threads = config.threads or max(1, cores // jobs)
    configs = [replace(config, **arm_options(config, arm), device=device, threads=threads) for arm in arms]
    if jobs == 1:
        for one in configs:
            _train(one, folder / one.arm, RunDisplay(screen, one.arm))
    else:
        _parallel(configs, folder, jobs, screen)


def arm_options(config: RunConfig, arm: Arm) -> dict[str, Any]:
    """What sets an arm apart: its first link, or for the half-rate control the original's inner rate."""
    return {"arm": arm, "inner_lr": config.inner_lr / 2 if arm == "half-rate" else config.inner_lr}


def _train(config: RunConfig, folder: Path, display: RunDisplay) -> None:
    run(config, folder, resume=(folder / "config.json").exists(), display=display)


def _parallel(configs: list[RunConfig], folder: Path, jobs: int, screen: Screen) -> None:
    context = multiprocessing.get_context("spawn")
    events: Queue[tuple[str, str, tuple[Any, ...]]] = context.Queue()
    waiting = list(configs)
    running: dict[str, Any] = {}
    failures: dict[str, tuple[str, str]] = {}
    with stop_requests() as stop:
        while running or (waiting and not stop() and not failures):
            while waiting and len(running) < jobs and not stop() and not failures:
                one = waiting.pop(0)
                running[one.arm] = context.Process(target=_child, args=(one, folder / one.arm, events))
                _start_deaf_to_ctrl_c(running[one.arm])
            if stop():
                _ask_to_stop(running)
            _pass_on(events, screen, failures)
            running = {arm: process for arm, process in running.items() if _alive(arm, process, failures)}
        _pass_on(events, screen, failures)
        if stop():
            raise Interrupted(folder, "between iterations")
    for arm, (kind, message) in failures.items():
        raise (
            UserError(f"arm {arm}: {message}") if kind == "UserError" else RuntimeError(f"arm {arm} failed:\n{message}")
        )


def _start_deaf_to_ctrl_c(process: Any) -> None:
    """A Ctrl-C reaches every process of the terminal; the parent alone answers it, by asking its children to stop."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit what is ignored
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def _ask_to_stop(running: dict[str, Any]) -> None:
    for process in running.values():
        if process.is_alive() and not getattr(process, "asked", False):
            os.kill(process.pid, signal.SIGTERM)
            process.asked = True


def _alive(arm: str, process: Any, failures: dict[str, tuple[str, str]]) -> bool:
    if process.is_alive():
        return True
    if process.exitcode not in (0, 3) and arm not in failures:
        failures[arm] = ("RuntimeError", f"its process ended with {process.exitcode}")
    return False


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
    """One arm in a process of its own; exit code 3 says that it was asked to stop and saved."""
    try:
        _train(config, folder, RunDisplay(_Forwarding(events), config.arm))
    except Interrupted:
        raise SystemExit(3) from None
    except Exception as error:
        import traceback

        known = isinstance(error, UserError)
        events.put((config.arm, "failed", ("UserError", str(error)) if known else ("", traceback.format_exc())))
        raise SystemExit(1) from None
