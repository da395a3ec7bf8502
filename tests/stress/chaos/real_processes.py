"""Whole processes, with their start: few, for each takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from .children import Ended, gradshare
from .settings import Chaos
from .signals import must_stop_well

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
HANGS = 300  # seconds after which a process is taken to hang


def train(chaos: Chaos, random: Random) -> Iterator[None]:
    """`train` undisturbed, and stopped by the clock, then to the end."""
    for i in range(5):
        run = chaos.runs[i % len(chaos.runs)]
        with chaos.trying("train as a process of its own", "undisturbed") as place:
            undisturbed = _process(run.start(place / "run"))
            undisturbed.must(undisturbed.code == 0, "an undisturbed run failed")
            run.must_equal(place / "run")
        yield
        for number in SIGNALS:
            seconds = random.uniform(0, undisturbed.seconds)
            with chaos.trying(f"train as a process of its own, {number.name}", f"{seconds:.3f} s") as place:
                ended = _process(run.start(place / "run"), seconds, number)
                run.finish(place / "run", _must_end(ended, number, place / "run"))
            yield


def compare(chaos: Chaos, random: Random) -> Iterator[None]:
    """`compare` with two processes at a time, stopped by the clock, then to the end."""
    run = chaos.runs[0]
    words = ("compare", *_without_arm(run.options), "--out")
    whole = chaos.folder / "comparison"
    undisturbed = _process((*words, str(whole), "--jobs", "2"))
    undisturbed.must(undisturbed.code == 0, "an undisturbed comparison failed")
    arms = [replace(run, whole=whole / arm) for arm in ("original", "shared")]
    for number in SIGNALS * 3:
        seconds = random.uniform(0, undisturbed.seconds)
        with chaos.trying(f"compare with two processes, {number.name}", f"{seconds:.3f} s") as place:
            again = (*words, str(place / "run"), "--jobs", "2")
            _must_end(_process(again, seconds, number), number, place / "run" / "shared")
            ended = gradshare(*again[:-1], "1")
            ended.must_be_tidy()
            ended.must(ended.code == 0, "a disturbed comparison could not be finished")
            for arm in arms:
                arm.must_equal(place / "run" / arm.whole.name)
        yield


def _must_end(ended: Ended, number: int, folder: Path) -> tuple[str, ...]:
    """The words to go on with, where it says so."""
    if ended.code == -number and (folder / "DONE").exists():  # all was said and done, and Python was on its way out
        return ()
    if number != signal.SIGKILL:
        return must_stop_well(ended, folder)
    ended.must(ended.code in (0, -signal.SIGKILL), "a process could not be killed")
    return ()


def _without_arm(options: tuple[str, ...]) -> Iterator[str]:
    for name, value in zip(options[::2], options[1::2], strict=True):
        if name != "--arm":
            yield from (name, value)


def _process(words: tuple[str, ...], seconds: float | None = None, number: int = 0) -> Ended:
    """A process of its own, sent a signal some seconds after it began to load PyTorch; what it started goes as well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradshare", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while "torch" not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
        time.sleep(0.01)
    began = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        if number == signal.SIGTERM and process.poll() is None:
            process.send_signal(number)
        elif process.poll() is None:
            os.killpg(process.pid, number)  # a Ctrl-C reaches all processes of a terminal; so does a machine's end
    text, _ = process.communicate(timeout=HANGS)
    return Ended(words, process.returncode, text, time.monotonic() - began)
