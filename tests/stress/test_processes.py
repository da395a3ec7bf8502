"""Several real processes with all algorithms and ways of sharing; torchrun, with processes that are killed or hang."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradshare as gs
from gradshare.runs import checkpoints
from tests.support import several
from tests.support.commands import SMALL, gradshare
from tests.support.several import ended, together


@pytest.fixture(scope="module")
def one(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(blobs, folder / "blobs")
    yield folder, several.in_one_process(folder, every=True)
    shutil.rmtree(folder)


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_compute_what_one_does(one: tuple[Path, dict[str, Any]], size: int) -> None:
    folder, found = one
    both = several.in_several(found, folder, size, every=True)
    assert sum(name.startswith("step: ") for name in found["core"]) == len(several.ALGORITHMS) * len(several.SHARING)
    several.check_core(both)
    several.check_evaluation(both)
    several.check_runs(both)


def cli(blobs: Path, out: Path, *more: object) -> list[str]:
    options = [*SMALL, "--dataset", blobs, "--inner-lr", "0.3", "--out", out, *more]
    last = dict(zip(options[::2], options[1::2], strict=True))
    return ["train", *(str(word) for option in last.items() for word in option)]


def torchrun(size: int, words: list[str]) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "-m", "gradshare", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(run, env=environment, start_new_session=True, **pipes)


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started, ordered by rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ranks = {}
    for pid in map(int, children):
        environment = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
        )
        if "LOCAL_RANK" in environment:
            ranks[int(environment["LOCAL_RANK"])] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_epoch(process: subprocess.Popen[str], size: int = 2) -> None:
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(f"{size} processes, each on the CPU, 1 thread"), first
    assert "epoch 1/" in process.stdout.readline()


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), (3, 1)])
def test_a_killed_process_ends_all_and_the_run_goes_on(blobs: Path, tmp_path: Path, size: int, victim: int) -> None:
    out = tmp_path / "run"
    with torchrun(size, cli(blobs, out, "--epochs", 200, "--iterations", 10, "--tasks", 3)) as process:
        wait_for_epoch(process, size)
        os.kill(workers_of(process)[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - killed < 30
    assert process.returncode == 1 and "exitcode  : -9" in errors
    said = [line for line in errors.splitlines() if line.startswith(("gradshare:", "to go on:"))]
    assert len(said) == 2, errors
    left = "".join(str(rank) for rank in range(size) if rank != victim)
    assert re.match(rf"gradshare: process [{left}] of {size} lost another one", said[0]), said
    assert said[1] == f"to go on: torchrun --nproc-per-node {size} -m gradshare train --resume {out}"
    assert not (out / "DONE").exists()
    config = json.loads((out / "config.json").read_text())
    del config["sha256"]  # edited by hand
    (out / "config.json").write_text(json.dumps({**config, "epochs": 1 + len(gs.load_run(out).metrics)}))
    assert "test, ensemble" in gradshare("train", "--resume", out).stdout  # by one process


@pytest.mark.parametrize("stop", ["SIGTERM to torchrun", "Ctrl-C to all"])
def test_a_polite_stop_of_torchrun_saves_and_says_how_to_go_on(blobs: Path, tmp_path: Path, stop: str) -> None:
    out = tmp_path / "run"
    with torchrun(2, cli(blobs, out, "--epochs", 200, "--iterations", 10)) as process:
        wait_for_epoch(process)
        if stop == "Ctrl-C to all":
            os.killpg(process.pid, signal.SIGINT)
            for worker in workers_of(process):  # workers of older versions of torchrun get the signal too, so twice
                os.kill(worker, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "all is saved" in errors and errors.count("to go on: torchrun --nproc-per-node 2 -m gradshare") == 1, errors
    assert "gradshare:" not in errors and "KeyboardInterrupt" not in errors
    newest = checkpoints.newest(out / "checkpoints")
    assert newest is not None and f"in epoch {newest[0].epoch + 1}" in errors


def test_a_process_that_hangs_is_given_up(blobs: Path, tmp_path: Path) -> None:
    words = cli(blobs, tmp_path / "run", "--epochs", 200, "--iterations", 10, "--timeout", 3)
    processes = together(2, ["-m", "gradshare", *words])
    wait_for_epoch(processes[0])
    processes[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    code, _, errors = ended(processes[:1], timeout=40)[0]
    processes[1].kill()
    processes[1].communicate()
    assert 2 < time.monotonic() - stopped < 20 and code == 1
    assert "lost another one" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("environment", "words", "message"),
    [
        ({"RANK": "3"}, ["--ways", "1"], "ways is 1"),  # one process, whatever its rank
        ({"RANK": "1", "WORLD_SIZE": "2"}, [], "did not meet: .*MASTER_ADDR"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, [], "did not meet: "),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, [], "did not meet: "),
    ],
)
def test_processes_that_do_not_meet_say_so(
    blobs: Path, tmp_path: Path, environment: dict[str, str], words: list[str], message: str
) -> None:
    run = [sys.executable, "-m", "gradshare", *cli(blobs, tmp_path / "run", "--timeout", 2, *words)]
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    result = subprocess.run(run, env={**os.environ, **environment}, **pipes)
    lines = [
        line for line in result.stderr.splitlines() if line.startswith("gradshare: ")
    ]  # PyTorch prints lines of its own
    assert result.returncode == 2 and len(lines) == 1 and re.search(message, lines[0]), result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_more_processes_than_tasks_are_an_error_of_one_line(blobs: Path, tmp_path: Path) -> None:
    found = ended(together(3, ["-m", "gradshare", *cli(blobs, tmp_path / "run")]))
    assert [code for code, _, _ in found] == [2, 2, 2], found
    errors = "".join(errors for _, _, errors in found)
    lines = [line for line in errors.splitlines() if line.startswith("gradshare:")]  # PyTorch prints lines of its own
    assert len(lines) == 1 and "3 processes for 2 tasks" in lines[0] and "Traceback" not in errors
    assert not (tmp_path / "run").exists()
