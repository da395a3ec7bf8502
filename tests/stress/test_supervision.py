"""Comparisons and grids whose processes are killed and stopped again and again, and machines with too little memory."""

from __future__ import annotations

import multiprocessing
import os
import pty
import random
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradshare.runs.workers import become_worker, stop_requests
from tests.support.commands import SMALL, epochs_done, gradshare, started, wait_for, worker
from tests.support.grids import MAML, SHARED

ARMS = ("original", "shared")
SEED = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10**6))


def sizes(blobs: Path, iterations: int = 40) -> list[object]:
    steps = ["--epochs", 3, "--iterations", iterations, "--device", "cpu", "--jobs", 2]
    return ["--dataset", blobs, *SMALL, "--shots", 1, *steps]


def compare(blobs: Path, out: Path) -> list[object]:
    return ["compare", *sizes(blobs), "--preset", MAML, "--out", out]


def command_of(kind: str, blobs: Path, out: Path) -> tuple[list[object], dict[str, str]]:
    """A command that trains both arms, and where the run of each arm is."""
    if kind == "compare":
        return compare(blobs, out), {arm: arm for arm in ARMS}
    runs = {"original": f"{MAML}/seed-0", "shared": f"{SHARED}/seed-0"}
    return ["grid", "run", MAML, SHARED, *sizes(blobs), "--out", out], runs


@pytest.fixture(scope="module")
def whole(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison that every disturbed one has to end with."""
    out = tmp_path_factory.mktemp("whole")
    gradshare(*compare(blobs, out))
    return out


def must_equal(whole: Path, out: Path, runs: dict[str, str]) -> None:
    for arm, run in runs.items():
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            assert (out / run / name).read_bytes() == (whole / arm / name).read_bytes(), (arm, name)


def no_worker(out: Path) -> bool:
    return not any(worker(out / arm) for arm in ARMS)


def test_the_parent_is_killed_again_and_again(blobs: Path, whole: Path, tmp_path: Path) -> None:
    """Its workers save and end by themselves each time; the command again goes on, also while they still save."""
    chance = random.Random(SEED)
    for number in range(8):
        with started(*compare(blobs, tmp_path)) as process:
            wait_for(lambda: not no_worker(tmp_path) or process.poll() is not None)
            time.sleep(chance.uniform(0, 2.5))
            process.kill()
        if number % 2:
            wait_for(lambda: no_worker(tmp_path), seconds=30)
    gradshare(*compare(blobs, tmp_path))
    must_equal(whole, tmp_path, {arm: arm for arm in ARMS})


def test_workers_are_killed_again_and_again(blobs: Path, whole: Path, tmp_path: Path) -> None:
    chance, done = random.Random(SEED), threading.Event()

    def kill() -> None:
        while not done.wait(chance.uniform(0.2, 4)):
            pid = worker(tmp_path / chance.choice(ARMS))
            if pid:
                os.kill(pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    codes = []
    try:
        for _ in range(6):
            with started(*compare(blobs, tmp_path)) as process:
                said, errors = process.communicate(timeout=300)
            codes.append(process.returncode)
            assert process.returncode in (0, 1) and "Traceback" not in said + errors
            assert errors.count("\n") == (process.returncode == 1), errors
    finally:
        done.set()
        killing.join()
    gradshare(*compare(blobs, tmp_path))
    must_equal(whole, tmp_path, {arm: arm for arm in ARMS})


@pytest.mark.parametrize("kind", ["compare", "grid"])
def test_a_worker_that_always_dies_is_named(kind: str, blobs: Path, whole: Path, tmp_path: Path) -> None:
    """After three tries: one line, exit code 1. The other run goes on, and the command again finishes this one."""
    words, place = command_of(kind, blobs, tmp_path)
    with started(*words) as process:
        seen: set[int] = set()
        while len(seen) < 3:
            wait_for(lambda: worker(tmp_path / place["shared"]) not in (0, *seen), process)
            seen.add(pid := worker(tmp_path / place["shared"]))
            if pid:
                os.kill(pid, signal.SIGKILL)
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in said + errors
    assert errors.count("\n") == 1 and place["shared"] in errors and "signal 9" in errors
    assert (tmp_path / place["original"] / "DONE").exists()
    gradshare(*words)
    must_equal(whole, tmp_path, place)


STOPS = ("SIGTERM to the parent", "SIGTERM to all", "Ctrl-C to all", "Ctrl-C twice")


@pytest.mark.parametrize(("kind", "stop"), [*(("compare", stop) for stop in STOPS), ("grid", "Ctrl-C to all")])
def test_a_stopped_command_goes_on(kind: str, stop: str, blobs: Path, whole: Path, tmp_path: Path) -> None:
    words, place = command_of(kind, blobs, tmp_path)
    with started(*words) as process:
        wait_for(lambda: all(epochs_done(tmp_path / run) for run in place.values()), process)
        number = signal.SIGINT if stop.startswith("Ctrl-C") else signal.SIGTERM
        if stop.endswith("parent"):
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
        if stop.endswith("twice"):
            time.sleep(0.05)
            process.send_signal(number)
        message = process.communicate(timeout=60)[1]
    assert process.returncode == 3 and f"to go on: gradshare {words[0]}" in message and "Traceback" not in message
    assert not any((tmp_path / run / "DONE").exists() for run in place.values())
    again = shlex.split(message.rpartition("to go on: gradshare ")[2])
    gradshare(*again)
    must_equal(whole, tmp_path, place)


def save_slowly(ready: Any) -> None:
    become_worker()
    with stop_requests() as stop:
        ready.set()
        while not stop():
            time.sleep(0.01)
        time.sleep(1)  # the second request comes here
    raise SystemExit(3)


def test_a_worker_that_saves_is_not_hurried() -> None:
    """A scheduler sends SIGTERM to all processes, and then the parent asks its workers to stop."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=save_slowly, args=(ready,))
    process.start()
    assert ready.wait(60)
    process.terminate()
    time.sleep(0.3)
    process.terminate()
    process.join(60)
    assert process.exitcode == 3


@pytest.fixture
def little_memory() -> Iterator[None]:
    """16 GiB for each process that a test starts, whatever the machine has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("words", ["train", "compare --jobs 2", "compare --jobs 1"])
def test_a_run_that_needs_too_much_memory_leaves_no_folder(blobs: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "new" / "run"
    small = ["--dataset", blobs, "--ways", 2, "--queries", 1, "--filters", 2]
    ended = gradshare(*words.split(), *small, "--tasks", 10**9, "--out", out, code=2)
    assert ended.stderr.startswith("gradshare: ") and "memory" in ended.stderr and ended.stderr.count("\n") == 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_terminal_shows_the_live_table(blobs: Path, tmp_path: Path) -> None:
    """On a terminal: a table that is drawn again and again, with every arm."""
    first, second = pty.openpty()
    words = [str(word) for word in ["-m", "gradshare", *compare(blobs, tmp_path), "--arms", "original"]]
    with subprocess.Popen([sys.executable, *words], stdout=second, stderr=second, close_fds=True) as process:
        os.close(second)
        shown = b""
        while True:
            try:
                shown += os.read(first, 65536)
            except OSError:  # the terminal is closed
                break
    os.close(first)
    text = shown.decode(errors="replace")
    assert process.returncode == 0 and "Best val." in text and "running" in text and "\x1b[" in text
